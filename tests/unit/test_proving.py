"""Tiny configs, outcomes and the command's arguments, without a real model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_compat import cli
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.proving import CASES, QUICK, Outcome, Proof, summary, table
from kernel_compat.proving.proof import require_cases
from kernel_compat.proving.subject import is_refusal
from kernel_compat.proving.tiny import LEVELS, VOCABULARY, WINDOW, Level, shrink
from kernel_compat.proving.weights import perturbed, randomize


class Config:
    """A config class as in transformers 4."""

    model_type = "test"

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        return {name: value.to_dict() if isinstance(value, Config) else value for name, value in vars(self).items()}


def text(**more: Any) -> Config:
    return Config(
        **{
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "attention_dropout": 0.1,
            **more,
        }
    )


def test_sizes_fit_each_other() -> None:
    tiny = shrink(text(head_dim=128))
    assert tiny.hidden_size == tiny.num_attention_heads * tiny.head_dim
    assert tiny.num_attention_heads % tiny.num_key_value_heads == 0
    assert tiny.num_key_value_heads < tiny.num_attention_heads
    assert (tiny.num_hidden_layers, tiny.vocab_size, tiny.attention_dropout) == (2, VOCABULARY, 0.0)


def test_the_config_itself_stays() -> None:
    config = text(vision_config=text())
    before = config.to_dict()
    shrink(config)
    assert config.to_dict() == before


def test_one_layer_of_each_kind_stays() -> None:
    kinds = ["linear", "linear", "sliding", "full"] * 8
    tiny = shrink(text(layer_types=kinds, sliding_window=1024, no_rope_layers=[1, 1, 1, 0] * 8))
    assert tiny.layer_types == ["linear", "sliding", "full"]
    assert tiny.no_rope_layers == [1, 1, 0]
    assert (tiny.num_hidden_layers, tiny.sliding_window) == (3, WINDOW)


def test_layers_named_by_number_stay() -> None:
    tiny = shrink(text(cross_attention_layers=[3, 8, 13]))
    assert tiny.num_hidden_layers == 2
    assert tiny.cross_attention_layers == [1]


def test_a_window_that_is_off_is_turned_on_for_one_layer() -> None:
    tiny = shrink(text(use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * 32))
    assert (tiny.use_sliding_window, tiny.sliding_window) == (True, WINDOW)
    assert tiny.layer_types == ["full_attention", "sliding_attention"]


def test_every_expert_sees_every_token() -> None:
    tiny = shrink(text(num_experts=128, num_experts_per_tok=8))
    assert tiny.num_experts == tiny.num_experts_per_tok == 4


def test_special_tokens_stay_apart_and_in_the_vocabulary() -> None:
    tiny = shrink(
        text(text_config=text(bos_token_id=31999), image_token_id=31999, video_token_id=31998, pad_token_id=0)
    )
    assert tiny.image_token_id == tiny.text_config.bos_token_id
    assert len({tiny.image_token_id, tiny.video_token_id, tiny.pad_token_id}) == 3
    assert max(tiny.image_token_id, tiny.video_token_id) < tiny.text_config.vocab_size


def test_overrides_win_also_in_nested_configs() -> None:
    tiny = shrink(text(text_config=text()), {"hidden_size": 48, "text_config": {"vocab_size": 50}})
    assert (tiny.hidden_size, tiny.text_config.vocab_size) == (48, 50)


def test_levels() -> None:
    config = text(num_key_value_heads=None)
    assert shrink(config).num_key_value_heads is None
    assert shrink(config, level=Level(missing=True)).num_key_value_heads == 4
    wide = shrink(config, level=Level(widths=False))
    assert (wide.hidden_size, wide.num_hidden_layers) == (4096, 2)
    assert LEVELS[0] == Level()


def test_rotary_sections_fit_the_head() -> None:
    tiny = shrink(text(head_dim=128, rope_parameters={"mrope_section": [16, 24, 24]}))
    assert sum(tiny.rope_parameters["mrope_section"]) == tiny.head_dim // 2
    added = shrink(text(head_dim=128, rope_parameters={"rope_type": "default"}), multimodal_rope=True)
    assert sum(added.rope_parameters["mrope_section"]) == added.head_dim // 2


def test_weights_are_the_same_each_time_and_norms_stay() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))

    first, second = model(), model()
    randomize(first)
    randomize(second)
    assert torch.equal(first[0].weight, second[0].weight)
    assert bool((first[1].weight == 1).all())
    relative = (perturbed(first)["0.weight"] / first[0].weight - 1).abs().max()
    assert 0 < relative < 1e-6


PROOF = Proof(
    "llama",
    "5.0.0",
    (
        Outcome("LlamaForCausalLM", "plain", "equal", 3.2e-7, 1e-5),
        Outcome("LlamaForCausalLM", "packed_mask", "wrong", 0.8765, 1e-5),
        Outcome("LlamaForCausalLM", "padded_holes", "refused", reason="ValueError: no"),
    ),
    seconds=1.5,
)


def test_a_proof_is_as_bad_as_its_worst_case() -> None:
    assert PROOF.verdict == "wrong"
    assert not PROOF.ok
    assert Proof("a", "5.0.0", PROOF.outcomes[2:]).verdict == "refused"
    assert Proof("a", "5.0.0", no_recipe="none").verdict == "no recipe"
    assert Proof("a", "5.0.0", no_recipe="none").ok
    assert Proof("a", "5.0.0").verdict == "not applicable"


def test_a_proof_goes_through_json() -> None:
    document = json.loads(json.dumps(PROOF.to_json()))
    assert "seconds" not in document
    assert [outcome["difference"] for outcome in document["outcomes"]] == [None, 0.9, None]
    assert Proof.from_json(document).to_json() == document


def test_summary() -> None:
    counts = summary([PROOF, Proof("a", "5.0.0", no_recipe="none")])
    assert (counts["tried"], counts["wrong"], counts["no recipe"], counts["equal"]) == (2, 1, 1, 0)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_refusals_are_the_librarys_own() -> None:
    from kernel_compat.attention.mask_reduction import reduce_mask

    assert is_refusal(raised(UnsupportedFeatureError("sinks", "a kernel", "")))
    assert not is_refusal(raised(ValueError("from elsewhere")))
    with pytest.raises(ValueError, match="4D") as caught:
        reduce_mask(torch.full((1, 1, 3, 3), 0.5), 3, 3)
    assert is_refusal(caught.value)


def test_refusals_count_wherever_the_library_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "proving" / "kernel_compat_shims" / "shim.py"
    file.parent.mkdir(parents=True)
    file.write_text("raise ValueError('no')")
    with pytest.raises(ValueError, match="no") as caught:
        runpy.run_path(str(file))
    assert is_refusal(caught.value)


def test_unknown_cases() -> None:
    require_cases(QUICK)
    require_cases(None)
    with pytest.raises(ValueError, match="packed_positions"):
        require_cases(["packed"])
    assert set(QUICK) < set(CASES)


@pytest.mark.parametrize(
    "arguments",
    [
        ["prove"],
        ["prove", "--all", "llama"],
        ["prove", "--workers", "0", "--all"],
        ["prove", "--timeout", "x", "--all"],
    ],
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert capsys.readouterr().err


def test_the_table_keeps_the_cases_that_are_not_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    refuses = Proof("a", "5.0.1", PROOF.outcomes[2:])
    table.record([PROOF, refuses, Proof("b", "5.0.0", PROOF.outcomes[:1]), Proof("c", "5.0.0", no_recipe="none")], file)
    table.record([Proof("a", "5.1.0", PROOF.outcomes[:1])], file)
    monkeypatch.setattr(table, "_table", lambda: table._read(file))
    assert table.releases() == ["5.0", "5.1"]
    assert table.known("5.0.2") == {
        "a": {"refused": ("padded_holes",)},
        "b": {},
        "c": {"no recipe": ()},
        "llama": {"wrong": ("packed_mask",), "refused": ("padded_holes",)},
    }
    assert table.known("5.1.0") == {"a": {}}
    assert table.known("6.0.0") == {}
    found = [table.wrong_cases(name, "5.0.0") for name in ("a", "b", "c", "llama", "d")]
    assert found == [(), (), None, ("packed_mask",), None]
