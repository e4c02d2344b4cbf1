from __future__ import annotations

import copy
import functools
import importlib
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kernel_compat
from kernel_compat import (
    AttentionName,
    Environment,
    Features,
    ForwardSpec,
    Kernel,
    UnsupportedFeatureError,
    api,
    known_kernels,
    register_attention,
    registered_attention,
    unregister_attention,
)
from kernel_compat.attention import defaults
from kernel_compat.attention.mask_function import attention_mask_function
from kernel_compat.attention.registry import AttentionRegistry
from kernel_compat.cli import main
from kernel_compat.environment import Device
from kernel_compat.patching.installation import Installation
from kernel_compat.policy.capabilities import capabilities, require_features
from kernel_compat.policy.fallback import next_fallback

REFERENCE = "flash_attention_reference"


def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    return query, None


def varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:
    return q


def functions() -> dict[str, Any]:
    table: dict[str, Any] = importlib.import_module(
        "transformers.modeling_utils"
    ).ALL_ATTENTION_FUNCTIONS._global_mapping
    return table


def masks() -> dict[str, Any]:
    table: dict[str, Any] = importlib.import_module(
        "transformers.masking_utils"
    ).ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    return table


def snapshot() -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(functions()), dict(masks())


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionRegistry]:
    """An empty registry and an installation without shims, instead of the process's own."""
    made = AttentionRegistry()
    monkeypatch.setattr(defaults, "registry", made)
    monkeypatch.setattr(defaults, "installation", Installation([made], lambda: ([], {})))
    yield made
    defaults.installation.uninstall()


def resolve(name: object) -> AttentionName | None:
    return defaults.registry.resolve(name)


@dataclass
class UnhashableForward:
    """Not hashable, because it is a dataclass with __eq__."""

    scale: float = 1.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None


# bad arguments: none of them registers anything

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a name that is None": ({"name": None, "kernel": REFERENCE}, TypeError, "must be a string, not None"),
    "a name that is bytes": ({"name": b"x_flash", "kernel": REFERENCE}, TypeError, "must be a string"),
    "a name that is a number": ({"name": 5, "kernel": REFERENCE}, TypeError, "not 5"),
    "a name that is a list": ({"name": ["x_flash"], "kernel": REFERENCE}, TypeError, "must be a string"),
    "an empty name": ({"name": "", "kernel": REFERENCE}, ValueError, "must not be empty"),
    "a blank name": ({"name": " \t", "kernel": REFERENCE}, ValueError, "must not be empty"),
    "a hub kernel's name": ({"name": "kernels-community/flash-attn", "kernel": REFERENCE}, ValueError, "hub kernel"),
    "a hub kernel's name with a revision": ({"name": "org/flash@v1:f", "kernel": REFERENCE}, ValueError, "hub kernel"),
    "a paged name": ({"name": "paged|x_flash", "kernel": REFERENCE}, ValueError, "letters, digits"),
    "a name with a space": ({"name": "x flash", "kernel": REFERENCE}, ValueError, "letters, digits"),
    "a name with a line feed": ({"name": "x_flash\n", "kernel": REFERENCE}, ValueError, "letters, digits"),
    "an unknown kernel": (
        {"name": "x_flash", "kernel": "flash_attention_9"},
        ValueError,
        "'flash_attention_9' is no kernel",
    ),
    "an unknown kernel says which there are": ({"name": "x_flash", "kernel": ""}, ValueError, REFERENCE),
    "no kernel": ({"name": "x_flash", "kernel": None}, TypeError, "a kernel, a forward or both"),
    "features of a kernel": (
        {"name": "x_flash", "kernel": REFERENCE, "forward": ForwardSpec(features={"varlen"})},
        ValueError,
        "features are those of a forward",
    ),
    "an unknown feature": (
        {"name": "x_flash", "forward": ForwardSpec(forward, ["varlen", "speed"])},
        ValueError,
        "no such features: 'speed'; there are: causal, window",
    ),
    "one feature as a string": (
        {"name": "x_flash", "forward": ForwardSpec(forward, "varlen")},
        TypeError,
        "not the string 'varlen'",
    ),
    "no features": ({"name": "x_flash", "forward": ForwardSpec(forward, 3)}, TypeError, "not 3"),  # type: ignore[arg-type]
    "a number for a kernel": ({"name": "x_flash", "kernel": 3}, TypeError, "not 3"),
    "a function for a kernel": ({"name": "x_flash", "kernel": varlen}, TypeError, "flash_attn_varlen_func"),
    "a kernel without varlen": (
        {"name": "x_flash", "kernel": SimpleNamespace(flash_attn_func=varlen)},
        ValueError,
        "has no flash_attn_varlen_func",
    ),
    "a kernel whose varlen is no function": (
        {"name": "x_flash", "kernel": SimpleNamespace(flash_attn_func=varlen, flash_attn_varlen_func=None)},
        ValueError,
        "has no flash_attn_varlen_func",
    ),
    "a kernel whose varlen has no signature": (
        {"name": "x_flash", "kernel": SimpleNamespace(flash_attn_varlen_func=type)},
        ValueError,
        "flash_attn_varlen_func can't be read",
    ),
    "a kernel whose varlen has other keywords": (
        {"name": "x_flash", "kernel": SimpleNamespace(flash_attn_varlen_func=lambda q, k, v, cu_seqlens_q: q)},
        ValueError,
        "does not take cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal",
    ),
    "a forward that is a string": (
        {"name": "x_flash", "kernel": REFERENCE, "forward": "sdpa"},
        TypeError,
        "forward .* 'sdpa'",
    ),
    "a mask that is a number": (
        {"name": "x_flash", "kernel": REFERENCE, "mask": 1},
        TypeError,
        "mask must be callable",
    ),
    "a name of transformers": (
        {"name": "sdpa", "kernel": REFERENCE},
        ValueError,
        "belongs to transformers.*override=True",
    ),
    "FA2's own name": ({"name": "flash_attention_2", "kernel": REFERENCE}, ValueError, "belongs to transformers"),
    "FA3's own name": ({"name": "flash_attention_3", "kernel": REFERENCE}, ValueError, "override=True"),
    "eager": ({"name": "eager", "kernel": REFERENCE}, ValueError, "belongs to transformers"),
}


@pytest.mark.parametrize("installed", [False, True], ids=["before install", "after install"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, installed: bool) -> None:
    arguments, error, says = BAD[case]
    if installed:
        kernel_compat.install()
    names, tables = registered_attention(), snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning about a name that isn't registered either
        with pytest.raises(error, match=says):
            register_attention(**arguments)
    assert registered_attention() == names
    assert snapshot() == tables
    assert resolve(arguments["name"]) is None


def test_unregistering_what_is_not_registered() -> None:
    with pytest.raises(ValueError, match="'x_flash' is not registered; registered are: none"):
        unregister_attention("x_flash")
    register_attention("y_flash", REFERENCE)
    with pytest.raises(ValueError, match="registered are: y_flash"):
        unregister_attention("x_flash")


# the registry


def test_any_kernel() -> None:
    module = ModuleType("their_kernel")
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    own = Kernel("own", ())
    for name, kernel in {"a_flash": "flash_attention_2", "b_flash": own, "c_flash": module}.items():
        register_attention(name, kernel=kernel)
    entries = registered_attention()
    assert list(entries) == ["a_flash", "b_flash", "c_flash"]
    assert entries["a_flash"].kernel is known_kernels()["flash_attention_2"]  # needs no usable package here
    assert entries["b_flash"].kernel is own
    assert entries["c_flash"].kernel.name == "their_kernel"
    assert not any(entry.builtin for entry in entries.values())


def test_the_answer_is_a_copy() -> None:
    register_attention("x_flash", REFERENCE)
    registered_attention().clear()
    assert "x_flash" in registered_attention()


@pytest.mark.parametrize("first", ["register", "install"])
def test_before_or_after_install(first: str) -> None:
    """The tables are the same in either order."""
    before = snapshot()
    mask = functools.partial(forward)
    calls = [
        lambda: register_attention("x_flash", REFERENCE, forward=forward),
        lambda: register_attention("y_flash", REFERENCE, mask=mask),
    ]
    if first == "install":
        kernel_compat.install()
        assert "x_flash" not in functions()
    for call in calls:
        call()
    if first == "register":
        assert snapshot() == before
        assert kernel_compat.status().attention == {"x_flash": "pending", "y_flash": "pending"}
        kernel_compat.install()
    attention = kernel_compat.status().attention
    assert attention["x_flash"] == attention["y_flash"] == "available"
    assert kernel_compat.status().ok
    assert functions()["x_flash"] is forward
    assert callable(functions()["y_flash"])
    assert masks()["y_flash"] is mask
    from kernel_compat.attention.mask_function import plain_mask_function

    # Without an entry in the mask table upstream drops the padding.
    assert masks()["x_flash"] is plain_mask_function
    assert ("paged|y_flash" in functions()) == ("paged|flash_attention_2" in before[0])
    assert "paged|x_flash" not in functions()  # transformers' paged forward would bypass the registered one
    added = {"x_flash", "y_flash", REFERENCE, "flash_attention_torch", "flash_attention_flex", "flash_attention_4"}
    assert {key.removeprefix("paged|") for key in functions().keys() - before[0].keys()} <= added
    for name in ("x_flash", "y_flash", "paged|x_flash"):
        entry = resolve(name)
        assert entry is not None
        assert entry.name == name.removeprefix("paged|")
    kernel_compat.uninstall()
    assert snapshot() == before
    assert resolve("x_flash") is None
    assert list(registered_attention()) == ["x_flash", "y_flash"]  # kept for the next install()
    kernel_compat.install()
    assert functions()["x_flash"] is forward


def test_the_kernels_own_names_come_with_install() -> None:
    assert registered_attention() == {}
    before = snapshot()
    kernel_compat.install()
    entries = registered_attention()
    assert entries[REFERENCE].builtin
    assert entries[REFERENCE].kernel is known_kernels()[REFERENCE]
    assert entries["flash_attention_torch"].builtin
    assert entries["flash_attention_torch"].kernel is known_kernels()["flash_attention_torch"]
    # transformers has its own name from 5.4 on.
    assert ("flash_attention_4" in entries) == ("flash_attention_4" not in before[0])
    assert "flash_attention_2" not in entries
    kernel_compat.uninstall()
    assert registered_attention() == {}
    assert snapshot() == before


def test_a_builtin_name_may_be_taken() -> None:
    kernel_compat.install()
    register_attention(REFERENCE, "flash_attention_2", forward=forward)
    assert functions()[REFERENCE] is forward
    unregister_attention(REFERENCE)
    assert registered_attention()[REFERENCE].builtin
    assert functions()[REFERENCE] is not forward
    assert resolve(REFERENCE) is registered_attention()[REFERENCE]


# override


@pytest.mark.parametrize("installed", [False, True], ids=["before install", "after install"])
def test_overriding_a_name_of_transformers(installed: bool) -> None:
    before = snapshot()
    if installed:
        kernel_compat.install()
    register_attention("flash_attention_2", REFERENCE, forward=forward, override=True)
    if not installed:
        assert snapshot() == before
        kernel_compat.install()
    assert functions()["flash_attention_2"] is forward
    entry = resolve("flash_attention_2")
    assert entry is not None
    assert entry.kernel.name == REFERENCE
    kernel_compat.uninstall()
    assert snapshot() == before


def test_unregistering_an_override_restores_upstreams() -> None:
    kernel_compat.install()
    before = snapshot()
    register_attention("flash_attention_3", REFERENCE, override=True)
    assert snapshot() != before
    unregister_attention("flash_attention_3")
    assert snapshot() == before
    assert resolve("flash_attention_3") is None


@pytest.mark.parametrize("installed", [False, True], ids=["before install", "after install"])
def test_a_name_that_is_registered_already(installed: bool) -> None:
    if installed:
        kernel_compat.install()
    register_attention("x_flash", REFERENCE)
    register_attention("x_flash", REFERENCE)  # equal arguments, as from a setup function that runs twice
    first = registered_attention()["x_flash"]
    with pytest.raises(ValueError, match="'x_flash' is registered already; pass override=True"):
        register_attention("x_flash", "flash_attention_2")
    with pytest.raises(ValueError, match="registered already"):
        register_attention("x_flash", REFERENCE, forward=forward)
    assert registered_attention()["x_flash"] == first
    register_attention("x_flash", REFERENCE, forward=forward, override=True)
    assert registered_attention()["x_flash"].forward is forward
    kernel_compat.install()
    assert functions()["x_flash"] is forward


def test_the_same_module_twice_is_the_same_kernel() -> None:
    module = SimpleNamespace(flash_attn_varlen_func=varlen)
    register_attention("x_flash", module)
    register_attention("x_flash", module)
    with pytest.raises(ValueError, match="registered already"):
        register_attention("x_flash", SimpleNamespace(flash_attn_varlen_func=varlen))


def test_somebody_elses_entry_is_not_replaced() -> None:
    def theirs() -> None: ...

    functions()["x_flash"] = theirs
    try:
        register_attention("x_flash", REFERENCE)
        register_attention("y_flash", REFERENCE)
        report = kernel_compat.install()
        assert report.attention["x_flash"] == f"is taken in transformers by {__name__!r}"
        assert report.attention["y_flash"] == "available"
        assert not report.ok
        assert functions()["x_flash"] is theirs
        assert "x_flash" not in masks()
        assert resolve("x_flash") is None
        # After install() the error is raised at once, and nothing is registered.
        unregister_attention("x_flash")
        with pytest.raises(ValueError, match="'x_flash' is taken in transformers .*override=True"):
            register_attention("x_flash", REFERENCE)
        assert "x_flash" not in registered_attention()
        register_attention("x_flash", REFERENCE, forward=forward, override=True)
        assert functions()["x_flash"] is forward
        kernel_compat.uninstall()
        assert functions()["x_flash"] is theirs
    finally:
        functions().pop("x_flash", None)


def test_an_entry_that_somebody_has_replaced_is_left_and_named() -> None:
    def theirs() -> None: ...

    register_attention("x_flash", REFERENCE)
    kernel_compat.install()
    functions()["x_flash"] = theirs
    try:
        report = kernel_compat.uninstall()
        assert report.left_alone == ("the attention function of 'x_flash'",)
        assert functions()["x_flash"] is theirs
        assert "x_flash" not in masks()
    finally:
        functions().pop("x_flash", None)


def test_an_entry_that_somebody_puts_back_after_uninstall_is_restored_by_the_next() -> None:
    before = snapshot()
    register_attention("x_flash", REFERENCE)
    kernel_compat.install()
    with pytest.MonkeyPatch.context() as theirs:
        theirs.setitem(functions(), "x_flash", lambda: None)
        assert kernel_compat.uninstall().left_alone == ("the attention function of 'x_flash'",)
    assert "x_flash" in functions()
    assert kernel_compat.uninstall().left_alone == ()
    assert snapshot() == before


@pytest.mark.parametrize("installed", [False, True], ids=["before install", "after install"])
def test_unregister(installed: bool) -> None:
    if installed:
        kernel_compat.install()
    before, names = snapshot(), registered_attention()
    register_attention("x_flash", REFERENCE)
    unregister_attention("x_flash")
    assert registered_attention() == names
    assert snapshot() == before
    assert resolve("x_flash") is None


# the name itself


@pytest.mark.parametrize("name", ["my_attention", "FLASH", "fla_sh"])
def test_a_name_without_flash_warns(name: str) -> None:
    with pytest.warns(UserWarning, match="has no 'flash' in it") as caught:
        register_attention(name, REFERENCE)
    assert name in registered_attention()
    assert caught[0].filename == __file__


def no_mask(*args: object, **kwargs: object) -> None:
    """A mask function of attention that needs no mask."""


def test_a_name_without_flash_with_a_forward_alone_warns() -> None:
    """Its masks would be those of a flash attention."""
    with pytest.warns(UserWarning, match=r"has no 'flash' in it.* pass forward= and mask="):
        register_attention("ffpa", forward=forward)


def test_a_name_without_flash_with_its_own_masks_does_not(recwarn: pytest.WarningsRecorder) -> None:
    for name in ("magi", "ffpa"):
        register_attention(name, forward=forward, mask=no_mask)
    kernel_compat.install()
    assert not recwarn.list
    for name in ("magi", "ffpa"):
        assert functions()[name] is forward
        assert masks()[name] is no_mask


@pytest.mark.parametrize("name", ["x_flash", "veomni_flash_attention_4_with_sp", "flash-attn.v1", "ﬂash_flash"])
def test_a_name_with_flash_does_not(name: str, recwarn: pytest.WarningsRecorder) -> None:
    register_attention(name, REFERENCE)
    assert name in registered_attention()
    assert not recwarn.list


@pytest.mark.parametrize(
    "name", [None, 5, ["x_flash"], {"": "x_flash"}, "x_flash", "paged|x_flash", "paged|paged|x_flash"]
)
def test_what_does_not_resolve(name: object) -> None:
    assert resolve(name) is None
    register_attention("other_flash", REFERENCE)
    kernel_compat.install()
    assert resolve(name) is None


def test_a_forward_that_can_not_be_hashed() -> None:
    """Entries are hashable all the same: shims use them as dictionary keys."""
    register_attention("x_flash", REFERENCE, forward=UnhashableForward())
    assert {registered_attention()["x_flash"]: 1}
    register_attention("x_flash", REFERENCE, forward=UnhashableForward())


def test_threads_that_register() -> None:
    kernel_compat.install()
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(10):
                name = f"x{index}_flash_{turn}"
                register_attention(name, REFERENCE)
                assert resolve(name) is not None
                if turn % 2:
                    unregister_attention(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    expected = {f"x{index}_flash_{turn}" for index in range(6) for turn in range(0, 10, 2)}
    assert {name for name in registered_attention() if name.startswith("x")} == expected
    assert {name for name in functions() if name.startswith("x")} == expected


@pytest.mark.slow
def test_before_transformers_is_imported() -> None:
    """In a subprocess: registering imports nothing, and install() adds the name to transformers."""
    code = (
        "import sys, kernel_compat as k\n"
        "k.register_attention('x_flash', 'flash_attention_reference')\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules\n"
        "assert k.install().attention['x_flash'] == 'available'\n"
        "k.register_attention('y_flash', 'flash_attention_reference')\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table\n"
        "assert 'x_flash' in table.keys() and 'y_flash' in table.keys()\n"
        "k.uninstall()\n"
        "assert 'x_flash' not in table.keys() and 'y_flash' not in table.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


# a forward without a kernel, and its features


def test_a_forward_alone() -> None:
    for _ in range(2):  # the same registration twice is fine
        register_attention("x_flash", forward=ForwardSpec(forward, {"varlen", "window", "backward"}))
    found = capabilities("x_flash", Environment.detect())
    assert found is not None
    assert set(found.features.names()) == {"varlen", "window", "backward"}
    assert (found.unusable, found.runs_on) == ([], "its own forward")
    assert next_fallback("x_flash") == "sdpa"
    with pytest.raises(UnsupportedFeatureError, match=r"_flash_attention_forward.* Register the name with a kernel"):
        registered_attention()["x_flash"].kernel.load().flash_attn_func(None, None, None)


def test_a_forward_alone_that_declares_nothing_has_no_feature() -> None:
    register_attention("x_flash", forward=forward)
    found = capabilities("x_flash", Environment.detect())
    assert found is not None
    assert found.features.names() == ()


def test_the_features_of_a_forward_are_not_those_of_its_kernel() -> None:
    register_attention("x_flash", REFERENCE, ForwardSpec(forward, Features(softcap=False, window=False)))
    environment = Environment.detect()
    found = capabilities("x_flash", environment)
    assert found is not None
    assert found.features == Features(softcap=False, window=False)
    with pytest.raises(UnsupportedFeatureError, match="softcap"):
        require_features("x_flash", {"softcap"}, "Model", environment)


# names of other distributions


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes a distribution with a module of this source and these entry points, and puts it on the path."""

    def write(source: str, points: str) -> None:
        (tmp_path / "x_plugin.py").write_text(source)
        folder = tmp_path / "x_plugin-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: x-plugin\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[kernel_compat.attention]\n{points}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    api._from_entry_points.cache_clear()
    defaults.registry.declared.clear()
    yield write
    sys.modules.pop("x_plugin", None)
    api._from_entry_points.cache_clear()
    defaults.registry.declared.clear()


def test_names_of_entry_points(site: Callable[[str, str], None]) -> None:
    site(
        "MAPPING = {'kernel': 'flash_attention_reference'}\ndef made():\n    return {'kernel': 'flash_attention_2'}\n",
        "x_flash = x_plugin:MAPPING\ny_flash = x_plugin:made\nx_broken_flash = x_plugin:gone\nx/y = x_plugin:MAPPING",
    )
    register_attention("y_flash", "flash_attention_3")  # the program's own comes first
    names = registered_attention()
    assert {name: entry.kernel.name for name, entry in names.items()} == {
        "x_flash": "flash_attention_reference",
        "y_flash": "flash_attention_3",
    }
    found = kernel_compat.install()
    assert "x_flash" in functions()
    assert not found.ok
    assert found.attention["x_flash"] == "available"
    assert "AttributeError" in found.attention["x_broken_flash"]
    assert "looks like a hub kernel" in found.attention["x/y"]


def test_the_command_line_knows_names_of_entry_points(site: Callable[[str, str], None], tmp_path: Path) -> None:
    site("MAPPING = {'kernel': 'flash_attention_reference'}", "x_flash = x_plugin:MAPPING")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for words in (["explain", "x_flash"], ["plan", "--attn", "x_flash"], ["check", "x_flash"], ["status"]):
        made = subprocess.run(
            [sys.executable, "-m", "kernel_compat", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        assert "x_flash" in made.stdout


# wrappers


@pytest.mark.parametrize("name", ["x_flash", REFERENCE])
def test_the_functions_of_a_name(name: str) -> None:
    register_attention("x_flash", REFERENCE)
    q, k, v = (torch.randn(1, 2, 3, 8) for _ in range(3))
    module = SimpleNamespace(is_causal=True, parameters=list)
    output, _ = kernel_compat.attention_function(name)(module, q, k, v, None, scaling=0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(output, expected)
    assert kernel_compat.mask_function(name) is attention_mask_function


def test_the_functions_of_a_name_with_its_own() -> None:
    register_attention("x_flash", REFERENCE, forward, mask=varlen)
    assert kernel_compat.attention_function("x_flash") is forward
    assert kernel_compat.mask_function("x_flash") is varlen
    with pytest.raises(ValueError, match="'z_flash' is no kernel"):
        kernel_compat.attention_function("z_flash")


def test_an_entry_point_that_calls_this_library(site: Callable[[str, str], None]) -> None:
    source = """
from kernel_compat import ForwardSpec, attention_function, mask_function
def made():
    inner = attention_function("flash_attention_reference")
    def forward(*args, **kwargs):
        return inner(*args, **kwargs)
    return {"forward": ForwardSpec(forward, {"varlen"}), "mask": mask_function("flash_attention_reference")}
"""
    site(source, "x_flash = x_plugin:made")
    assert kernel_compat.status().attention == {"x_flash": "pending"}


def test_a_name_of_an_entry_point_is_the_programs_to_replace(site: Callable[[str, str], None]) -> None:
    site("MAPPING = {'kernel': 'flash_attention_reference'}", "x_flash = x_plugin:MAPPING")
    kernel_compat.install()
    register_attention("x_flash", "flash_attention_2")
    assert registered_attention()["x_flash"].kernel.name == "flash_attention_2"
    with pytest.raises(ValueError, match="'x_flash' is registered already"):
        register_attention("x_flash", "flash_attention_3")


def test_a_name_of_an_entry_point_unregistered_first(site: Callable[[str, str], None]) -> None:
    site("MAPPING = {'kernel': 'flash_attention_reference'}", "x_flash = x_plugin:MAPPING")
    unregister_attention("x_flash")
    kernel_compat.install()
    assert "x_flash" not in registered_attention()


def test_the_command_line_says_why_an_entry_point_is_broken(
    site: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    site("", "x_flash = x_plugin:gone")
    assert main(["status"]) == 1
    assert "AttributeError" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["explain", "x_flash"])
    assert "its entry point x_plugin:gone could not be registered" in capsys.readouterr().err
    assert main(["check", "x_flash", "--json"]) == 1
    assert "its entry point x_plugin:gone could not be registered" in capsys.readouterr().out


def test_a_forward_of_another_gpu_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    register_attention("x_flash", forward=ForwardSpec(forward, Features(min_capability=(10, 0))))
    kernel = registered_attention()["x_flash"].kernel
    environment = Environment(packages={}, devices=(Device("NVIDIA H100", (9, 0)),))
    with pytest.raises(kernel_compat.KernelUnavailableError, match="x_flash"):
        kernel.load(environment)


def test_unproven_of_an_inner_block_ends_with_it() -> None:
    before = defaults.unproven()
    with kernel_compat.installed(unproven="refuse"):
        with kernel_compat.installed(unproven="allow"):
            assert defaults.unproven() == "allow"
        assert defaults.unproven() == "refuse"
    assert defaults.unproven() == before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_pass_from_process_to_process(copied: Any) -> None:
    """One that can't be unpickled breaks a pool of processes, and hides its reason."""
    errors: list[Exception] = [
        kernel_compat.KernelUnavailableError("k", ["r"], "Install it."),
        kernel_compat.UnsupportedFeatureError("f", "k", "a"),
        kernel_compat.AttentionRefusedError("n", "p", "r", "i"),
        kernel_compat.SeamError("s", "e", "f", "v"),
        kernel_compat.UnprotectedError("s", "p", "r"),
        kernel_compat.UnknownNameError("x"),
        kernel_compat.MissingExtraError("y"),
    ]
    # Another distribution's may be loaded, as kernel-compat-run's, which has a test of its own.
    ours = {
        kind for kind in kernel_compat.KernelCompatError.__subclasses__() if kind.__module__ == "kernel_compat.errors"
    }
    assert {type(error) for error in errors} >= ours
    for error in errors:
        other = copied(error)
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
