"""Models loaded under a registered name have a proven type, or are proven while they are loaded, or are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny import CAUSAL_LMS, NAME

import kernel_compat
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.proving import loading, table

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "_proofs", {})


def use(monkeypatch: pytest.MonkeyPatch, **types: Any) -> None:
    monkeypatch.setattr(table, "_table", lambda: {table.minor(transformers.__version__): types})


def build() -> Any:
    return transformers.AutoModelForCausalLM.from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)


def test_a_type_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_compat.install(unproven="refuse")
    use(monkeypatch, llama={})
    monkeypatch.setattr(loading, "prove_here", lambda *_: pytest.fail("it is proven already"))
    build()


def test_a_type_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, llama={"wrong": ["padded_left"]})
    with pytest.raises(UnsupportedFeatureError, match="LlamaForCausalLM.*padded_left"):
        build()


def test_a_type_that_is_in_no_table_is_proven_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel_compat.install(unproven="refuse")
    use(monkeypatch)
    build()
    (kept,) = tmp_path.glob("kernel-compat/proofs/*.json")
    assert json.loads(kept.read_text())["verdict"] == "equal"
    monkeypatch.setattr(loading, "_proofs", {})
    monkeypatch.setattr(loading, "prove_here", lambda *_: pytest.fail("it is kept"))
    build()


class Unprovable(transformers.LlamaForCausalLM):
    """A class of which no tiny model can be made."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config._attn_implementation == "eager":
            raise RuntimeError("no eager attention")


def test_a_class_that_can_not_be_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        Unprovable._from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)

    use(monkeypatch, llama={})
    kernel_compat.install(unproven="refuse")
    with pytest.raises(UnsupportedFeatureError, match="no tiny model of it could be made"):
        load()
    kernel_compat.install(unproven="warn")
    with pytest.warns(UserWarning, match="no tiny model of it could be made"):
        load()
    kernel_compat.install(unproven="allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load()


def test_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="warn, refuse, allow"):
        kernel_compat.install(unproven="maybe")
