"""transformers' own names where their packages are installed: the legacy flag, the ladder, and SDPA's backends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from remote_code import saved_remote_code
from tiny import TRANSFORMERS, VOCAB, load, saved

import kernel_compat
from kernel_compat.models import use_sdpa_backends
from kernel_compat.policy import best_available, load_with_fallback, plan_attention

pytestmark = pytest.mark.gpu


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0)).to("cuda")


def assert_right(path: Path, model: Any, **options: Any) -> None:
    """Assert that the error against eager in float32 is at most twice eager's own in bfloat16."""
    with torch.no_grad():
        truth, yardstick = (
            load(path, "eager", **options).to("cuda", dtype)(input_ids=tokens()).logits.float()
            for dtype in (torch.float32, torch.bfloat16)
        )
        ours = model.to("cuda", torch.bfloat16)(input_ids=tokens()).logits.float()
    assert (ours - truth).norm() <= 2 * (yardstick - truth).norm()


def test_the_legacy_flag_under_upstreams_own_name(remote: Path, usable: Callable[[str], None]) -> None:
    usable("flash_attention_2")
    path = saved_remote_code(remote / "legacy")
    if Version("5.4") <= TRANSFORMERS:
        with pytest.raises(ValueError, match="does not support Flash Attention 2"):
            load(path, "flash_attention_2", trust_remote_code=True, device_map="cuda")
    with kernel_compat.installed():
        model = load(path, "flash_attention_2", trust_remote_code=True, device_map="cuda")
        assert model.config._attn_implementation == "flash_attention_2"
        assert_right(path, model, trust_remote_code=True)


def test_the_best_that_is_available_loads_and_is_right(models: Path) -> None:
    choice = best_available(requires={"backward"})
    path, asked = saved(models, "llama"), []

    def attempt(name: str) -> Any:
        asked.append(name)
        return load(path, name)

    with kernel_compat.installed():
        model = load_with_fallback(attempt, choice.name)
        assert asked == [choice.name]
        assert model.config._attn_implementation == choice.name
        assert_right(path, model)


@pytest.mark.parametrize("lengths", ["position_ids", "tensors", "integers"])
def test_the_best_varlen_kernel_takes_packed_sequences(models: Path, lengths: str) -> None:
    """The best usable kernel, under transformers' name for it if there is one."""
    path, parts = saved(models, "llama"), (17, 20, 3)
    ids = tokens()[:1]
    packed: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in parts])[None].to("cuda")}
    if lengths != "position_ids":
        ends = torch.tensor([0, 17, 37, 40], dtype=torch.int32, device="cuda")
        longest = torch.tensor(20) if lengths == "tensors" else 20
        packed |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    with kernel_compat.installed(), torch.no_grad():
        name = plan_attention(None, packed_sequence=True).attn_implementation
        model = load(path, name).to("cuda", torch.bfloat16)
        ours = model(input_ids=ids, use_cache=False, **packed).logits.float()
        truth, yardstick = (
            torch.cat([eager(input_ids=part, use_cache=False).logits.float() for part in ids.split(parts, 1)], 1)
            for eager in (load(path, "eager").to("cuda", dtype) for dtype in (torch.float32, torch.bfloat16))
        )
    assert (ours - truth).norm() <= 2 * (yardstick - truth).norm()


def test_falling_back_to_what_is_installed(models: Path) -> None:
    """The ladder falls back from a missing kernel to the next one that the device and the installed packages allow."""
    steps = kernel_compat.policy.ladder("flash_attention_3")
    if steps[0].usable:
        pytest.skip("flash_attention_3 is usable here")
    expected = next(step.name for step in steps if step.usable)
    path = saved(models, "llama")
    with kernel_compat.installed():
        model = load_with_fallback(lambda name: load(path, name), "flash_attention_3")
        assert model.config._attn_implementation == expected
        assert_right(path, model)


OPERATORS = {
    "cudnn_attention": "aten::_scaled_dot_product_cudnn_attention",
    "flash_attention": "aten::_scaled_dot_product_flash_attention",
    "efficient_attention": "aten::_scaled_dot_product_efficient_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}


def operators(run: Callable[[], object]) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    counts = {event.key: event.count for event in profile.key_averages()}
    return {backend: counts[operator] for backend, operator in OPERATORS.items() if operator in counts}


def inputs() -> dict[str, Any]:
    """Inputs with a mask of ones: without a mask transformers up to 4.57 looks for packed sequences and passes SDPA a 4D mask."""
    return {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens()), "use_cache": False}


class TestSdpaBackends:
    @pytest.mark.parametrize("backend", [*OPERATORS, None])
    @pytest.mark.parametrize("reentrant", [None, True, False])
    def test_forward_and_recomputation(self, models: Path, backend: str | None, reentrant: bool | None) -> None:
        """Each layer runs the chosen backend, also when a checkpoint recomputes it in autograd's thread."""
        model = load(saved(models, "llama"), "sdpa").to("cuda", torch.bfloat16).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        expected = backend or "cudnn_attention"
        loss = []
        with use_sdpa_backends(model, backend):
            forward = operators(lambda: loss.append(model(**inputs()).logits.float().square().mean()))
            backward = operators(loss[0].backward)
        layers = model.config.num_hidden_layers
        assert forward == {expected: layers}
        assert backward == ({expected: layers} if reentrant is not None else {})
        before = operators(lambda: model(**inputs()))
        assert set(before) == set(
            operators(lambda: load(saved(models, "llama"), "sdpa").to("cuda", torch.bfloat16).train()(**inputs()))
        )

    def test_the_order_in_a_process_that_has_not_chosen_yet(self) -> None:
        """torch sets its own order at the first choice of a kernel; it must not replace ours."""
        code = """
            import torch
            from kernel_compat.models import use_sdpa_backends

            class Attention(torch.nn.Module):
                def forward(self, x):
                    return torch.nn.functional.scaled_dot_product_attention(x, x, x)

            model, x = Attention(), torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                if ours:
                    with use_sdpa_backends(model, ["math", "flash_attention"]):
                        model(x)
                model(x)
            print(*(event.key for event in profile.key_averages()))
        """

        def used(ours: bool) -> set[str]:
            command = [sys.executable, "-c", f"ours = {ours}\n{textwrap.dedent(code)}"]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr
            return {backend for backend, operator in OPERATORS.items() if operator in run.stdout.split()}

        torchs = used(ours=False)  # flash attention in torch 2.10, cuDNN's from 2.11 on
        assert torchs
        assert "math" not in torchs
        assert used(ours=True) == {"math", *torchs}

    def test_a_backend_that_can_not(self, models: Path) -> None:
        """Flash attention doesn't support float32: torch raises an error instead of choosing another backend."""
        model = load(saved(models, "llama"), "sdpa").to("cuda")
        with use_sdpa_backends(model, "flash_attention"), pytest.raises(RuntimeError, match="No available kernel"):
            model(**inputs())
        assert model(**inputs()).logits.isfinite().all()

    def test_compiled(self, models: Path) -> None:
        model = load(saved(models, "llama"), "sdpa").to("cuda", torch.bfloat16)
        with torch.no_grad(), use_sdpa_backends(model, "efficient_attention"):
            eager = model(**inputs()).logits
            compiled = torch.compile(model, fullgraph=True)
            compiled(**inputs())
            used = operators(lambda: compiled(**inputs()))
            assert set(used) == {"efficient_attention"}
            found = compiled(**inputs()).logits
        assert (found - eager).float().norm() <= 0.02 * eager.float().norm()
