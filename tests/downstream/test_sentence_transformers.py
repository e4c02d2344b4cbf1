"""sentence-transformers with an encoder under a registered name: embeddings, and those of a trained model, are eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kernel_compat

sentence_transformers = pytest.importorskip("sentence_transformers")

import torch  # noqa: E402
import transformers  # noqa: E402
from frameworks import sentences, tokenizer  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from tiny import NAME  # noqa: E402


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    # With flash attention on all supported releases, which BERT has from 5.0 on.
    config = transformers.DistilBertConfig(
        vocab_size=97,
        dim=64,
        hidden_dim=96,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
    )
    transformers.DistilBertModel(config).save_pretrained(folder)
    words = tokenizer()
    words.model_max_length = 32
    words.save_pretrained(folder)
    return folder


def load(folder: Path, name: str) -> Any:
    return SentenceTransformer(str(folder), device="cpu", model_kwargs={"attn_implementation": name})


def test_embeddings(encoder: Path, installed: Any) -> None:
    eager, ours = (load(encoder, name) for name in ("eager", NAME))
    assert ours[0].auto_model.config._attn_implementation == NAME
    texts = sentences(40)
    torch.testing.assert_close(*(torch.tensor(model.encode(texts, batch_size=8)) for model in (ours, eager)))
    alone = torch.tensor(eager.encode(texts[:8], batch_size=1))  # without padding
    torch.testing.assert_close(torch.tensor(ours.encode(texts[:8], batch_size=8)), alone, rtol=1e-4, atol=1e-5)
    with kernel_compat.models.padding_free(ours):
        found = torch.tensor(ours.encode(texts[:8], batch_size=8))
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_training(encoder: Path, installed: Any) -> None:
    """20 steps with in-batch negatives."""
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    texts = sentences(160)
    found = []
    for name in ("eager", NAME):
        model = load(encoder, name)
        loss_of = MultipleNegativesRankingLoss(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        for step in range(20):
            sides = [texts[step * 8 + side : step * 8 + 8 : 2] for side in (0, 1)]
            loss = loss_of([model.tokenize(side) for side in sides], torch.zeros(0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(torch.stack(losses))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
