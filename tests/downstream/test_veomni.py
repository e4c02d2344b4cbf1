"""VeOmni's own models under its attention names, with its code as published and as docs/frameworks.md says to change it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("veomni")

import torch
import torch.distributed as dist
import transformers
from pages import code, deleted_names
from tiny import SHAPE, VOCAB
from torch import Tensor
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.distributed.parallel_state import clear_parallel_state, get_parallel_state, init_parallel_state
from veomni.models.auto import build_foundation_model
from veomni.ops.kernel_registry import KERNEL_REGISTRY
from veomni.ops.kernels import attention
from veomni.ops.kernels.attention import flash
from veomni_kernels import VEOMNI

import kernel_compat

LENGTHS = [5, 7, 12]
OWN = [f"veomni_flash_attention_{version}_with_sp" for version in (2, 3, 4)]
TABLE = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping


@pytest.fixture(autouse=True)
def parallel_state() -> Iterator[None]:
    """One rank, without which VeOmni loads no weights on a CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_parallel_state(device_type="cpu")
    yield
    clear_parallel_state()
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=16)).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    kernel_compat.uninstall()
    for name in {*OWN} & kernel_compat.registered_attention().keys():
        kernel_compat.unregister_attention(name)


def tokens() -> Tensor:
    return torch.randint(4, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))


def build(folder: Path, name: str) -> Any:
    """A model of VeOmni's own modeling code, with eager ops."""
    ops = {field.name: "eager" for field in fields(OpsImplementationConfig) if field.name.endswith("_implementation")}
    config = OpsImplementationConfig(**{**ops, "qat_implementation": "none", "attn_implementation": name})
    options = {"torch_dtype": "float32", "init_device": "cpu", "ops_implementation": config}
    model = build_foundation_model(str(folder), str(folder), **options)
    assert type(model).__module__.startswith("veomni.")
    return model


def logits_and_gradients(folder: Path, name: str) -> list[Tensor]:
    """Of packed sequences with the lengths and the mask of ones of VeOmni's collator."""
    model, ids = build(folder, name), tokens()
    assert model.config._attn_implementation == name
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    lengths = {f"cu_seq_lens_{side}": offsets for side in "qk"} | {f"max_length_{side}": max(LENGTHS) for side in "qk"}
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    mask = torch.ones_like(ids)
    logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, **lengths).logits
    return with_gradients(model, logits)


def apart(folder: Path) -> list[Tensor]:
    """The same of transformers' model under eager attention, each sequence computed separately."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    parts = [model(input_ids=part, use_cache=False).logits for part in tokens().split(LENGTHS, 1)]
    return with_gradients(model, torch.cat(parts, 1))


def with_gradients(model: Any, logits: Tensor) -> list[Tensor]:
    logits.square().sum().backward()
    return [logits.detach(), torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])]


def ulysses_group() -> Any:
    state = get_parallel_state()
    return state.ulysses_group if state.ulysses_enabled else None


class Recording:
    """The reference kernel; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        kernel = kernel_compat.known_kernels()["flash_attention_reference"]
        self.features, self._functions = kernel.features, kernel.load()

    def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._functions.flash_attn_varlen_func(*args, **kwargs)


def test_as_published(folder: Path) -> None:
    """Its names are taken by its import; only FlashAttention-4's reaches the kernel of the name past its mapping."""
    for name in OWN:
        kernel_compat.register_attention(
            name, kernel="flash_attention_reference", forward=attention.fused_attention_forward
        )
    kernel_compat.install()
    for name in OWN:
        assert "is taken in transformers by 'veomni.ops.kernels.attention'" in kernel_compat.status().attention[name]
    kernel_compat.uninstall()
    for name in OWN:
        kernel_compat.unregister_attention(name)
        kernel_compat.register_attention(
            name, kernel="flash_attention_reference", forward=attention.fused_attention_forward, override=True
        )
    kernel_compat.install()
    torch.testing.assert_close(logits_and_gradients(folder, OWN[2]), apart(folder), rtol=1e-4, atol=1e-5)
    with pytest.raises(ImportError, match="flash_attn|kernels"):
        logits_and_gradients(folder, OWN[0])


@pytest.mark.parametrize("name", OWN)
def test_with_the_library_s_all_to_alls(folder: Path, name: str) -> None:
    """VeOmni's code as published, and none of its attention."""
    kernel_compat.register_attention(
        name, kernel="flash_attention_reference", sequence_parallel=ulysses_group, override=True
    )
    kernel_compat.install()
    torch.testing.assert_close(logits_and_gradients(folder, name), apart(folder), rtol=1e-4, atol=1e-5)


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> None:
    """VeOmni with what the page says to delete deleted."""
    source = inspect.getsource(flash.flash_attention_forward)
    source, found = re.subn(
        r"    if module\.config\._attn_implementation == .*?\n        \)\n", "", source, flags=re.DOTALL
    )
    assert found == 1
    assert source.count("=fa_kernel_implementation") == 1
    namespace = dict(vars(flash))
    exec(source.replace("=fa_kernel_implementation", "=module.config._attn_implementation"), namespace)
    for name in OWN:
        monkeypatch.setitem(attention._ATTENTION_FORWARD_DISPATCH, name, namespace["flash_attention_forward"])
        monkeypatch.delitem(TABLE, name)  # the calls of `register`
    hub = transformers.integrations.hub_kernels
    monkeypatch.setattr(hub, "load_and_register_attn_kernel", flash._original_load_and_register_attn_kernel)
    for name in deleted_names("VeOmni"):
        monkeypatch.delattr(flash, name)


@pytest.mark.usefixtures("edited")
def test_as_the_page_says(folder: Path) -> None:
    kernels = {name: Recording() for name in OWN}
    flex_and_magi = {name: TABLE[f"veomni_{name}_attention_with_sp"] for name in ("flex", "magi")}
    named: dict[str, str] = {}

    def register(name: str, kernel: str, forward: Any) -> None:
        named[name] = kernel
        kernel_compat.register_attention(name, kernel=kernels[name], forward=forward)

    library = SimpleNamespace(register_attention=register, install=kernel_compat.install)
    exec(code("VeOmni"), {"kernel_compat": library, "fused_attention_forward": attention.fused_attention_forward})
    assert named == {name: f"flash_attention_{version}" for name, version in zip(OWN, (2, 3, 4), strict=True)}
    expected = apart(folder)
    for name, kernel in kernels.items():
        torch.testing.assert_close(logits_and_gradients(folder, name), expected, rtol=1e-4, atol=1e-5)
        assert kernel.calls == SHAPE["num_hidden_layers"]
    assert flex_and_magi == {name: TABLE[f"veomni_{name}_attention_with_sp"] for name in ("flex", "magi")}
    assert set(flex_and_magi.values()) == {attention.fused_attention_forward}


def test_the_names_of_the_table_are_there() -> None:
    names = deleted_names("VeOmni")
    assert len(names) > 3
    assert [name for name in names if not hasattr(flash, name)] == []


def test_the_registry_has_the_kernels_of_the_library_s_tests() -> None:
    found: dict[Any, Any] = {}
    for place, specs in KERNEL_REGISTRY._specs.items():
        found[place] = [
            (
                name,
                " ".join(
                    [spec.hardware.device_type]
                    if isinstance(spec.hardware.device_type, str)
                    else spec.hardware.device_type
                ),
                spec.hardware.min_compute_capability or 0,
                spec.hardware.max_compute_capability or 0,
            )
            for name, spec in specs.items()
        ]
    assert found == VEOMNI
