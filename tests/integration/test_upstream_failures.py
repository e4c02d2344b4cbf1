"""Bugs of transformers on the releases that have them, and their repair with the library installed.

S1 to S9 number the silent failures in the design's table. Where transformers imports a FlashAttention package, the module
`flash_attn_interface` stands in for FlashAttention-3's: its functions are the reference kernel's, with FA3's parameters.
"""

from __future__ import annotations

import builtins
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import transformers.modeling_flash_attention_utils as upstream
import transformers.modeling_utils
from tiny import NAME, SHAPE, TRANSFORMERS, VOCAB, accepts, distance, load, saved
from torch import Tensor
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernel_compat
from kernel_compat.kernels import reference

RELEASE = TRANSFORMERS.release[:2]
BEFORE_5 = RELEASE < (5, 0)


def on(first: tuple[int, int], last: tuple[int, int] | None = None) -> pytest.MarkDecorator:
    """Skip a test on releases that don't have the bug: those before `first`, and those after `last` if given."""
    there = first <= RELEASE and (last is None or last >= RELEASE)
    releases = [".".join(map(str, release)) for release in (first, last) if release is not None]
    return pytest.mark.skipif(not there, reason=f"only on {' to '.join(releases)}{'' if last else ' and later'}")


def attend(name: str, **options: Any) -> Tensor:
    """Upstream's own entry to flash attention, on fixed inputs of shape (1, 8, 2, 16)."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 8, 2, 16, generator=generator) for _ in range(3))
    implementation = "implementation" if BEFORE_5 else "attn_implementation"
    arguments = {"query_length": 8, "is_causal": True, **{implementation: name}, **options}
    return upstream._flash_attention_forward(q, k, v, None, **arguments)


def expected(**options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 8, 2, 16, generator=generator) for _ in range(3))
    return reference.flash_attn_func(q, k, v, causal=True, **options)


def like_fa3(function: Callable[..., Tensor], scale: float = 1.0) -> Callable[..., Tensor]:
    """The function with FlashAttention-3's parameters: neither sinks nor dropout. `scale` tells two kernels apart."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
        **lengths: Any,
    ) -> Tensor:
        return scale * function(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, **lengths)

    parameters = [p for p in inspect.signature(call).parameters.values() if p.name != "lengths"]
    if function is reference.flash_attn_varlen_func:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        parameters += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def functions(scale: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(
        flash_attn_func=like_fa3(reference.flash_attn_func, scale),
        flash_attn_varlen_func=like_fa3(reference.flash_attn_varlen_func, scale),
        flash_attn_with_kvcache=like_fa3(reference.flash_attn_func, scale),
    )


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset upstream to a process that hasn't loaded flash attention yet, with an importable FlashAttention-3."""
    for name in ("_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn", "_is_fa3", "_process_flash_kwargs_fn"):
        if RELEASE == (4, 54):
            vars(upstream).pop(name, None)
        elif hasattr(upstream, name):
            monkeypatch.setattr(upstream, name, None)
    if hasattr(upstream, "_loaded_implementation"):
        monkeypatch.setattr(upstream, "_loaded_implementation", None)
    fa3 = ModuleType("flash_attn_interface")
    vars(fa3).update(vars(functions()))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3)
    yield
    for name in ("_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn", "_is_fa3"):
        if RELEASE == (4, 54):
            vars(upstream).pop(name, None)


@pytest.fixture
def other(installed: kernel_compat.Report) -> Iterator[str]:
    """A second registered name, whose kernel returns three times the reference's output and has neither sinks nor softcap."""
    kernel_compat.register_attention("other_flash", kernel=functions(3.0))
    yield "other_flash"
    kernel_compat.unregister_attention("other_flash")


class TestS1MaskDropped:
    """A registered name without a mask function drops the padding."""

    def seen_mask(self, models: Path, name: str) -> Any:
        model = load(saved(models, "llama"), name)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
        model(input_ids=torch.randint(3, VOCAB, (2, 6)), attention_mask=mask)
        return self.masks[-1]

    @pytest.fixture(autouse=True)
    def recorded(self) -> None:
        self.masks: list[Any] = []

    def forward(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        self.masks.append(mask)
        return query.transpose(1, 2), None

    def test_upstream(self, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "plain_attention", self.forward)
        assert self.seen_mask(models, "plain_attention") is None

    def test_ours(self, models: Path, installed: kernel_compat.Report) -> None:
        kernel_compat.register_attention("recorded_flash", "flash_attention_reference", forward=self.forward)
        try:
            mask = self.seen_mask(models, "recorded_flash")
        finally:
            kernel_compat.unregister_attention("recorded_flash")
        assert mask.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]


@pytest.mark.usefixtures("fresh")
@on((4, 54), (4, 57))
class TestS2FirstServesAll:
    def test_upstream(self) -> None:
        first, second = functions(), functions(3.0)
        attend(first)  # type: ignore[arg-type]
        torch.testing.assert_close(attend(second), expected())  # type: ignore[arg-type]

    def test_ours(self, other: str) -> None:
        for _ in range(2):
            torch.testing.assert_close(attend(NAME), expected())
            torch.testing.assert_close(attend(other), 3 * expected())

    def test_upstreams_own_names(self, other: str) -> None:
        attend(other)
        torch.testing.assert_close(attend("flash_attention_3"), expected())
        first, second = functions(), functions(5.0)
        attend(first)  # type: ignore[arg-type]
        torch.testing.assert_close(attend(second), 5 * expected())  # type: ignore[arg-type]

    def test_the_name_upstream_ignores(self, other: str) -> None:
        """Upstream's callers pass `attn_implementation`, but its function doesn't read it."""
        attend("flash_attention_3")
        q = torch.randn(1, 8, 2, 16)
        found = upstream._flash_attention_forward(q, q, q, None, 8, True, attn_implementation=other)
        torch.testing.assert_close(found, 3 * reference.flash_attn_func(q, q, q, causal=True))


@pytest.mark.usefixtures("fresh")
@on((5, 0), (5, 22))
class TestS3FailedLoad:
    def test_upstream(self) -> None:
        attend("flash_attention_3")
        with pytest.raises(ValueError, match="Could not find"):
            attend("missing_flash")
        torch.testing.assert_close(attend("missing_flash"), expected())  # the kernel that was loaded before

    def test_ours(self, installed: kernel_compat.Report) -> None:
        attend("flash_attention_3")
        for _ in range(2):
            with pytest.raises(ValueError, match="Could not find"):
                attend("missing_flash")
        torch.testing.assert_close(attend("flash_attention_3"), expected())


@pytest.mark.usefixtures("fresh")
class TestS4WindowTooWide:
    @on((4, 54), (4, 55))
    def test_upstream(self) -> None:
        torch.testing.assert_close(attend("flash_attention_3", sliding_window=3), expected(window_size=(3, 3)))

    def test_ours(self, installed: kernel_compat.Report) -> None:
        """The window covers three keys, including the query's own, as in the eager mask."""
        torch.testing.assert_close(attend(NAME, sliding_window=3), expected(window_size=(2, 0)))


@pytest.mark.usefixtures("fresh")
@on((4, 54), (4, 54))
class TestPositionsOfABatch:
    """Without a mask upstream finds sequences by their positions, of which it has those of one row for a batch."""

    def attend(self, queries: int, batch: int, axes: int = 0) -> tuple[Tensor, Tensor]:
        """Under upstream's own name, for the last queries of eight tokens; and the right output.

        Args:
            axes: the number of position ids of a token, as Qwen2-VL has them; 0 for other models.
        """
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(batch, n, 2, 16, generator=generator) for n in (queries, 8, 8))
        positions = torch.arange(8)[None, -queries:]
        options = {
            "implementation": "flash_attention_3",
            "position_ids": positions.expand(axes, batch, -1) if axes else positions,
        }
        found = upstream._flash_attention_forward(q, k, v, None, queries, True, **options)
        return found, reference.flash_attn_func(q, k, v, causal=True)

    def test_upstream(self) -> None:
        found, right = self.attend(8, 2)
        torch.testing.assert_close(found[0], right[0])
        assert distance(found[1], right[1]) > 0.5

    @pytest.mark.parametrize("axes", [0, 3])
    @pytest.mark.parametrize(("queries", "batch"), [(8, 2), (8, 1), (3, 2), (1, 2), (3, 1)])
    def test_with_the_library(self, installed: kernel_compat.Report, queries: int, batch: int, axes: int) -> None:
        torch.testing.assert_close(*self.attend(queries, batch, axes))

    def test_packed_rows(self, installed: kernel_compat.Report) -> None:
        """Sequences that begin at the same places in both rows."""
        q, k, v = (torch.randn(2, 8, 2, 16) for _ in range(3))
        options = {"implementation": "flash_attention_3", "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
        found = upstream._flash_attention_forward(q, k, v, None, 8, True, **options)
        parts = [reference.flash_attn_func(q[:, at], k[:, at], v[:, at], causal=True) for at in (slice(3), slice(3, 8))]
        torch.testing.assert_close(found, torch.cat(parts, 1))


@pytest.mark.usefixtures("fresh")
class TestS5SinksAndSoftcapDropped:
    sinks = torch.tensor([0.5, -0.5])

    def test_upstream_sinks(self) -> None:
        torch.testing.assert_close(attend("flash_attention_3", s_aux=self.sinks), expected())

    @on((4, 55), (5, 20))
    def test_upstream_softcap(self) -> None:
        torch.testing.assert_close(attend("flash_attention_3", softcap=2.0), expected())

    def test_ours_by_a_kernel_that_has_them(self, installed: kernel_compat.Report) -> None:
        torch.testing.assert_close(attend(NAME, s_aux=self.sinks), expected(s_aux=self.sinks))
        torch.testing.assert_close(attend(NAME, softcap=2.0), expected(softcap=2.0))

    @pytest.mark.parametrize(("option", "feature"), [("s_aux", "attention sinks"), ("softcap", "softcap")])
    def test_ours_by_one_that_does_not(self, other: str, option: str, feature: str) -> None:
        value = self.sinks if option == "s_aux" else 2.0
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match=f"{feature}.*flash_attention_reference"):
            attend(other, **{option: value})


@on((5, 0), (5, 3))
class TestS6Fa4TakenForFa2:
    """Packages with metadata like pip's, in a separate process that reports a GPU."""

    @pytest.fixture(scope="class")
    def answers(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bool]]:
        """The answers with the library installed, and after its removal."""
        folder = tmp_path_factory.mktemp("fa4")
        info = folder / "flash_attn_4-4.0.0b36.dist-info"
        (folder / "flash_attn" / "cute").mkdir(parents=True)
        (folder / "flash_attn" / "cute" / "__init__.py").write_text("")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
        (info / "RECORD").write_text("flash_attn/cute/__init__.py,,\n")
        (info / "top_level.txt").write_text("flash_attn\n")
        script = f"""
            import sys, json
            sys.path.insert(0, {str(folder)!r})
            import torch
            torch.cuda.is_available = lambda: True
            import kernel_compat
            assert kernel_compat.install()["tf5_fa4_namespace"].state == "applied"
            import transformers.modeling_utils as m, transformers.utils as u
            ours = [u.is_flash_attn_2_available(), m.is_flash_attn_2_available()]
            kernel_compat.uninstall()
            upstream = [u.is_flash_attn_2_available(), m.is_flash_attn_2_available()]
            print(json.dumps(dict(ours=ours, upstream=upstream)))
        """
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
        )
        assert run.returncode == 0, run.stderr
        answers: dict[str, list[bool]] = json.loads(run.stdout.splitlines()[-1])
        return answers

    def test_upstream(self, answers: dict[str, list[bool]]) -> None:
        assert answers["upstream"] == [True, True]

    def test_ours(self, answers: dict[str, list[bool]]) -> None:
        assert answers["ours"] == [False, False]


class Asked(Exception):
    """`input()` was called."""


@pytest.mark.usefixtures("fresh")
@on((4, 54), (4, 54))
class TestS7Prompt:
    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def ask(prompt: str) -> str:
            raise Asked(prompt)

        monkeypatch.setattr(builtins, "input", ask)

    def test_upstream(self) -> None:
        with pytest.raises(Asked):
            attend("flash_attention_2")

    def test_ours(self, installed: kernel_compat.Report) -> None:
        with pytest.raises(kernel_compat.KernelUnavailableError, match="flash-attn is not installed.*pip install"):
            attend("flash_attention_2")


@on((4, 57), (4, 57))
class TestS9HubFallback:
    """With the kernels package installed, a hub kernel replaces names that start with flash_attention."""

    @pytest.fixture(autouse=True)
    def kernels_package(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        asked: list[str] = []

        def from_hub(name: str) -> None:
            asked.append(name)
            raise ConnectionError("no network")

        monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: True)
        monkeypatch.setattr(transformers.modeling_utils, "load_and_register_kernel", from_hub)
        return asked

    def test_upstream(self, models: Path, monkeypatch: pytest.MonkeyPatch, kernels_package: list[str]) -> None:
        monkeypatch.setitem(
            ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_mine", ALL_ATTENTION_FUNCTIONS["sdpa"]
        )
        with pytest.raises((ImportError, ConnectionError)):
            load(saved(models, "llama"), "flash_attention_mine")
        assert kernels_package == ["kernels-community/vllm-flash-attn3"]

    def test_ours(self, models: Path, installed: kernel_compat.Report, kernels_package: list[str]) -> None:
        kernel_compat.register_attention("flash_attention_mine", "flash_attention_reference")
        try:
            model = load(saved(models, "llama"), "flash_attention_mine")
        finally:
            kernel_compat.unregister_attention("flash_attention_mine")
        assert model.config._attn_implementation == "flash_attention_mine"
        assert kernels_package == []


@on((5, 0))
@pytest.mark.parametrize("name", ["mine_flash_attention_2", "mine_flash"])
class TestPlainNames:
    """A name that contains "flash", registered as transformers' documentation says."""

    def test_upstream(self, models: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        for table in (ALL_ATTENTION_FUNCTIONS, transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS):
            monkeypatch.setitem(table._global_mapping, name, table["sdpa"])
        error = ImportError if name.endswith("_2") and RELEASE <= (5, 3) else ValueError
        with pytest.raises(error):
            load(saved(models, "llama"), name)

    def test_ours(self, models: Path, installed: kernel_compat.Report, name: str) -> None:
        kernel_compat.register_attention(name, "flash_attention_reference")
        try:
            assert load(saved(models, "llama"), name).config._attn_implementation == name
        finally:
            kernel_compat.unregister_attention(name)


@on((4, 54), (4, 54))
class TestGenerateCountsWrong:
    """4.54's generate computes wrong sequence lengths and drops keys if a batch has no padding."""

    def lengths(self, models: Path, name: str) -> list[int]:
        model = load(saved(models, "llama"), name)
        ids = torch.randint(3, VOCAB, (2, 6))
        inputs = model.prepare_inputs_for_generation(
            ids, attention_mask=torch.ones_like(ids), cache_position=torch.arange(6), use_cache=False
        )
        return inputs["cu_seq_lens_k"].tolist() if "cu_seq_lens_k" in inputs else []

    def test_upstream(self, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "plain_flash", ALL_ATTENTION_FUNCTIONS["sdpa"])
        assert self.lengths(models, "plain_flash") == [0, 6, 11]  # out of twelve keys

    def test_ours(self, models: Path, installed: kernel_compat.Report) -> None:
        assert self.lengths(models, NAME) == []


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashAttention-4's stand-in: like the real one it only accepts maximum lengths as integers, and its fourth parameter is `qv`."""

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        **options: Any,
    ) -> Tensor:
        if not isinstance(max_seqlen_q, int) or not isinstance(max_seqlen_k, int):
            raise ValueError(f"Expected IntTuple, whose leaves are integers, but got {max_seqlen_q}")
        assert qv is None
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return reference.flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=softmax_scale, causal=causal)

    cute = ModuleType("flash_attn.cute")
    vars(cute).update(flash_attn_func=reference.flash_attn_func, flash_attn_varlen_func=varlen)
    package = ModuleType("flash_attn")
    vars(package).update(cute=cute)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(upstream, "_loaded_implementation", None)
    yield
    upstream._loaded_implementation = None


@pytest.mark.usefixtures("fa4")
@pytest.mark.skipif(RELEASE < (5, 4), reason="flash_attention_4 is transformers' own from 5.4 on")
class TestUpstreamsOwnFlashAttention4:
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])

    def test_upstream_dies_of_packed_sequences(self) -> None:
        with pytest.raises(ValueError, match="whose leaves are integers"):
            attend("flash_attention_4", position_ids=self.position_ids)

    def test_with_the_library(self) -> None:
        """Also if transformers has loaded the kernel before; uninstalling restores the original."""
        with pytest.raises(ValueError, match="whose leaves are integers"):
            attend("flash_attention_4", position_ids=self.position_ids)
        with kernel_compat.installed() as report:
            assert report["tf5_fa4_lengths"].state == "applied", report
            output = attend("flash_attention_4", position_ids=self.position_ids)
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, 8, 2, 16, generator=generator) for _ in range(3))
        parts = [reference.flash_attn_func(q[:, s], k[:, s], v[:, s], causal=True) for s in (slice(5), slice(5, 8))]
        torch.testing.assert_close(output, torch.cat(parts, dim=1))
        with pytest.raises(ValueError, match="whose leaves are integers"):
            attend("flash_attention_4", position_ids=self.position_ids)

    @pytest.mark.skipif(RELEASE >= (5, 19), reason="continuous batching calls it as every other forward does")
    def test_lengths_by_position(self) -> None:
        """Upstream's paged attention passes lengths by position: each request failed, and `generate_batch` returned nothing."""
        q = torch.randn(8, 2, 16)
        offsets = torch.tensor([0, 5, 8], dtype=torch.int32)

        def call() -> Tensor:
            varlen = upstream.lazy_import_paged_flash_attention("flash_attention_4")[0]
            output: Tensor = varlen(q, q, q, offsets, offsets, 5, 5, softmax_scale=0.25, causal=True)
            return output

        with pytest.raises(ValueError, match="whose leaves are integers"):
            call()
        with kernel_compat.installed():
            expected = reference.flash_attn_varlen_func(
                q, q, q, offsets, offsets, 5, 5, softmax_scale=0.25, causal=True
            )
            torch.testing.assert_close(call(), expected)


@on((5, 0))
class TestChunkedMasks:
    """A flash name's model that attends in chunks, as Llama 4: its mask function raises (huggingface/transformers#37351)."""

    def model(self, name: str) -> Any:
        config = transformers.Llama4TextConfig(
            **SHAPE,
            head_dim=8,
            intermediate_size_mlp=64,
            num_local_experts=2,
            attention_chunk_size=8,
            no_rope_layers=[1, 0],
        )
        torch.manual_seed(0)
        return transformers.Llama4ForCausalLM._from_config(config, attn_implementation=name).eval()

    @pytest.fixture
    def pair(self, installed: kernel_compat.Report) -> tuple[Any, Any]:
        eager, ours = (self.model(name) for name in ("eager", NAME))
        ours.load_state_dict(eager.state_dict())
        return eager, ours

    def test_upstream_raises(self, pair: tuple[Any, Any]) -> None:
        kernel_compat.uninstall()
        with (
            kernel_compat.installed(skip=["tf5_chunked_masks"]),
            pytest.raises(ValueError, match="cannot handle chunked attention"),
        ):
            pair[1](input_ids=torch.randint(3, VOCAB, (2, 20)))

    def test_with_the_library(self, pair: tuple[Any, Any]) -> None:
        ids = torch.randint(3, VOCAB, (2, 20))
        expected, found = (model(input_ids=ids).logits for model in pair)
        assert distance(found, expected) < 1e-5

    @pytest.mark.skipif(
        accepts(masking_utils.create_masks_for_generate, "block_sequence_ids")
        and not accepts(masking_utils.create_chunked_causal_mask, "block_sequence_ids"),
        reason="generate passes an argument that the mask function doesn't have",
    )
    def test_generate(self, pair: tuple[Any, Any]) -> None:
        """With a static cache, `generate` looks the mask function up in a mapping."""
        ids = torch.randint(3, VOCAB, (2, 20))
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
        expected, found = (model.generate(input_ids=ids, **options) for model in pair)
        assert torch.equal(found, expected)
