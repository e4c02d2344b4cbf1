"""Releases outside the supported range: names are refused at their first use, by the release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kernel_compat
from kernel_compat import Environment, KernelUnavailableError, policy
from kernel_compat.attention import defaults, unsupported
from kernel_compat.attention.registry import AttentionRegistry
from kernel_compat.attention.unsupported import unsupported_because
from kernel_compat.cli.status import name_status
from kernel_compat.patching.installation import Installation
from kernel_compat.patching.shim import discover

NAME = "unsupported_flash"
CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
}


def environment(**versions: str) -> Environment:
    real = Environment.detect()
    supported = {"transformers": "4.54.1"} if unsupported_because(real) else {}
    return Environment(packages={**real.packages, **supported, **versions}, imports=real.imports)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., kernel_compat.Report]]:
    """`install()` in an environment with other versions, under the real transformers."""
    registry = AttentionRegistry()
    monkeypatch.setattr(defaults, "registry", registry)

    def install(**versions: str) -> kernel_compat.Report:
        found = environment(**versions)
        monkeypatch.setattr(Environment, "detect", classmethod(lambda cls, distributions=(): found))
        monkeypatch.setattr(defaults, "installation", Installation([registry], discover))
        kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
        with pytest.warns(UserWarning, match="models are refused under registered attention names"):
            return kernel_compat.install()

    before = dict(vars(transformers.PreTrainedModel))
    yield install
    assert not kernel_compat.uninstall().left_alone
    kernel_compat.unregister_attention(NAME)
    assert dict(vars(transformers.PreTrainedModel)) == before


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def from_config(folder: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**CONFIG), attn_implementation=NAME)


def from_own_config(folder: Path) -> None:
    config = transformers.LlamaConfig(**CONFIG)
    config._attn_implementation = NAME
    transformers.LlamaForCausalLM(config)


def from_pretrained(folder: Path) -> None:
    llama().save_pretrained(folder)
    transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME)


def of_parts(folder: Path) -> None:
    llama().save_pretrained(folder)
    transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation={"": NAME})


def set_later(folder: Path) -> None:
    model = llama()
    model.set_attn_implementation(NAME)


def set_on_the_config(folder: Path) -> None:
    model = llama()
    model.config._attn_implementation = NAME
    model(input_ids=torch.ones(1, 4, dtype=torch.long))


def function(folder: Path) -> None:
    kernel_compat.attention_function(NAME)(None, *torch.ones(3, 1, 1, 1, 1), None)


def mask(folder: Path) -> None:
    kernel_compat.mask_function(NAME)(1, 1, 1)


USES = [from_config, from_own_config, from_pretrained, of_parts, set_on_the_config, function, mask]
USES += [set_later] * hasattr(transformers.PreTrainedModel, "set_attn_implementation")


@pytest.mark.parametrize(
    ("distribution", "version", "side"),
    [
        ("transformers", "4.53.3", "older than 4.54"),
        ("transformers", "4.53.0.dev0", "older than 4.54"),
        ("transformers", "6.0.0rc1", "newer than"),
        ("transformers", "6.0.0", "newer than"),
        ("torch", "2.9.1+cu128", "older than 2.10"),
        ("torch", "3.0.0a0+git", "newer than"),
    ],
)
def test_a_name_is_refused_at_its_first_use(
    new: Callable[..., kernel_compat.Report], distribution: str, version: str, side: str, tmp_path: Path
) -> None:
    report = new(**{distribution: version})
    assert not report.ok
    assert f"can't be used: {distribution} {version} is {side}" in report.attention[NAME]
    for use in [*USES, *USES]:  # upstream marks a name as loaded although that failed
        with pytest.raises(KernelUnavailableError) as caught:
            use(tmp_path)
        assert caught.value.kernel == NAME
        for part in (f"{distribution} {version} is {side}", "kernel-compat supports", "pip install"):
            assert part in str(caught.value)


def test_other_names_work_and_the_ladder_goes_on(new: Callable[..., kernel_compat.Report]) -> None:
    report = new(transformers="6.0.0")
    config = transformers.LlamaConfig(**CONFIG)
    model = policy.load_with_fallback(
        lambda name: transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name), NAME
    )
    assert model.config._attn_implementation == "sdpa"
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert not policy.ladder(NAME)[0].usable
    assert "transformers 6.0.0 is newer" in name_status(NAME, report)["reasons"][0]


@pytest.mark.parametrize(
    "versions",
    [
        {"transformers": "4.54.0.dev0"},
        {"transformers": "5.0.0rc3", "torch": "2.10.0a0+abc.nv25.12"},
        {"transformers": "5.99.0", "torch": "2.99.0.dev20260101+cu130"},
        {"transformers": "new"},
        {},
    ],
)
def test_supported(versions: dict[str, str]) -> None:
    assert unsupported_because(Environment(packages=versions)) == ""
    assert set(unsupported.SUPPORTED) == {"transformers", "torch"}


def test_a_pre_release_is_named() -> None:
    installation = Installation([AttentionRegistry()], lambda: ([], {}), lambda _: environment(transformers="5.0.0rc3"))
    with pytest.warns(UserWarning, match=r"transformers 5\.0\.0rc3 is no release: it is taken for 5\.0\.0"):
        installation.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installation.uninstall()
