"""Models that set only `_supports_flash_attn_2`, as remote code written for older releases does."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from remote_code import saved_remote_code
from tiny import CAUSAL_LMS, NAME, TRANSFORMERS, VOCAB, load
from transformers import PreTrainedModel

import kernel_compat
from kernel_compat.policy.flash_flags import declared_flash_support

BRIDGED = Version("5.4") <= TRANSFORMERS
only_bridged = pytest.mark.skipif(not BRIDGED, reason="transformers itself reads the legacy flag before 5.4")


@pytest.fixture
def legacy_model(remote: Path) -> Path:
    return saved_remote_code(remote / "legacy_model")


def ids() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


class TestRemoteCode:
    """`trust_remote_code=True` from a folder with `auto_map`, checked by upstream and by the library."""

    @only_bridged
    def test_upstream_refuses_flash_attention_2(self, legacy_model: Path) -> None:
        with pytest.raises(ValueError, match="LegacyForCausalLM does not support Flash Attention 2"):
            load(legacy_model, "flash_attention_2", trust_remote_code=True)

    @pytest.mark.usefixtures("installed")
    def test_upstream_finds_no_fault_with_the_model(self, legacy_model: Path) -> None:
        """Only the missing package is an error; tests/gpu loads the model with the package."""
        with pytest.raises(ImportError, match="flash_attn|FlashAttention2 has been toggled on"):
            load(legacy_model, "flash_attention_2", trust_remote_code=True)

    @pytest.mark.usefixtures("installed")
    def test_registered_name(self, legacy_model: Path) -> None:
        model = load(legacy_model, NAME, trust_remote_code=True)
        eager = load(legacy_model, "eager", trust_remote_code=True)
        assert model.config._attn_implementation == NAME
        torch.testing.assert_close(model(ids()).logits, eager(ids()).logits)

    @only_bridged
    def test_loaded_before_install(self, legacy_model: Path) -> None:
        model = load(legacy_model, "eager", trust_remote_code=True)
        assert not model._supports_flash_attn
        with kernel_compat.installed():
            assert model._supports_flash_attn is True
            assert type(model)._supports_flash_attn is True
        assert model._supports_flash_attn is False
        assert type(model)._supports_flash_attn is False


Flags = dict[str, Any]


def legacy(value: Any) -> Flags:
    return {"_supports_flash_attn_2": value}


def new(value: Any) -> Flags:
    return {"_supports_flash_attn": value}


def plain(name: str, **flags: Any) -> type:
    return type(name, (), flags)


def family(case: str) -> Any:
    """A model class; the case's name says which flags it and its bases set."""
    P = PreTrainedModel
    old, old_not = plain("Old", **legacy(True)), plain("OldNot", **legacy(False))
    newer, newer_not = plain("Newer", **new(True)), plain("NewerNot", **new(False))
    llama = transformers.LlamaPreTrainedModel
    made: dict[str, Any] = {
        "nothing": lambda: type("M", (P,), {}),
        "legacy": lambda: type("M", (P,), legacy(True)),
        "legacy False": lambda: type("M", (P,), legacy(False)),
        "legacy of the parent": lambda: type("M", (type("Parent", (P,), legacy(True)),), {}),
        "legacy, then legacy False": lambda: type("M", (type("Parent", (P,), legacy(True)),), legacy(False)),
        "legacy, then new False": lambda: type("M", (type("Parent", (P,), legacy(True)),), new(False)),
        "new, then legacy False": lambda: type("M", (type("Parent", (P,), new(True)),), legacy(False)),
        "new False, then legacy": lambda: type("M", (type("Parent", (P,), new(False)),), legacy(True)),
        "new False, then legacy, then nothing": lambda: type(
            "M", (type("Middle", (type("Parent", (P,), new(False)),), legacy(True)),), {}
        ),
        "new False, then legacy, then new False": lambda: type(
            "M", (type("Middle", (type("Parent", (P,), new(False)),), legacy(True)),), new(False)
        ),
        "both, new False": lambda: type("M", (P,), {**new(False), **legacy(True)}),
        "both, new True": lambda: type("M", (P,), {**new(True), **legacy(False)}),
        "native, then legacy False": lambda: type("M", (llama,), legacy(False)),
        "mixin before": lambda: type("M", (old, P), {}),
        "mixin False before a native": lambda: type("M", (old_not, llama), {}),
        "mixin behind": lambda: type("M", (P, old), {}),
        "mixin with the new flag behind": lambda: type("M", (P, newer), {}),
        "mixin with new False before a legacy parent": lambda: type(
            "M", (newer_not, type("Parent", (P,), legacy(True))), {}
        ),
        "two parents, legacy first": lambda: type(
            "M", (type("A", (P,), legacy(True)), type("B", (P,), new(False))), {}
        ),
        "two parents, new first": lambda: type("M", (type("B", (P,), new(False)), type("A", (P,), legacy(True))), {}),
    }
    return made[case]()


EXPECTED = {
    "nothing": False,
    "legacy": True,
    "legacy False": False,
    "legacy of the parent": True,
    "legacy, then legacy False": False,
    "legacy, then new False": False,
    "new, then legacy False": False,
    "new False, then legacy": True,
    "new False, then legacy, then nothing": True,
    "new False, then legacy, then new False": False,
    "both, new False": False,
    "both, new True": True,
    "native, then legacy False": False,
    "mixin before": True,
    "mixin False before a native": False,
    "mixin behind": True,
    "mixin with the new flag behind": False,
    "mixin with new False before a legacy parent": False,
    "two parents, legacy first": True,
    "two parents, new first": False,
}


def instance(model_class: Any) -> Any:
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    return model


@only_bridged
class TestRule:
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("case", EXPECTED)
    def test_nearest_class_decides(self, case: str, when: str) -> None:
        """For a class made before `install()` or after, read on the class and on an instance; undone by uninstalling."""
        if when == "before":
            made = family(case)
            own, before = dict(vars(made)), made._supports_flash_attn
            with kernel_compat.installed():
                assert made._supports_flash_attn is EXPECTED[case]
                assert instance(made)._supports_flash_attn is EXPECTED[case]
            assert made._supports_flash_attn is before
            assert dict(vars(made)) == own
        else:
            with kernel_compat.installed():
                made = family(case)
                assert made._supports_flash_attn is EXPECTED[case]
                assert instance(made)._supports_flash_attn is EXPECTED[case]
            assert made._supports_flash_attn is family(case)._supports_flash_attn
            assert set(vars(made)) == set(vars(family(case)))

    def test_set_later(self) -> None:
        """A framework may switch the flag of a model class on or off."""
        with kernel_compat.installed():
            made = family("legacy")
            made._supports_flash_attn_2 = False
            assert made._supports_flash_attn is False
            made._supports_flash_attn = True
            assert made._supports_flash_attn is True
        assert made._supports_flash_attn is True

    def test_on_an_instance(self) -> None:
        with kernel_compat.installed():
            model = instance(family("legacy"))
            model._supports_flash_attn_2 = False
            assert model._supports_flash_attn is False
            assert type(model)._supports_flash_attn is True
            model._supports_flash_attn = True
            assert model._supports_flash_attn is True

    def test_property(self) -> None:
        """A property is evaluated on an instance; on a class the property object, which is truthy, is ignored."""

        def says(self: Any) -> bool:
            return self.answer

        with kernel_compat.installed():
            made: Any = type("M", (PreTrainedModel,), legacy(property(says)))
            model = instance(made)
            for model.answer in (True, False):
                assert model._supports_flash_attn is model.answer
            assert made._supports_flash_attn is False

    def test_a_property_that_asks_a_part_which_is_not_built_yet(self) -> None:
        """transformers reads the flag before the parts are built, under every attention."""
        with kernel_compat.installed():

            class Composite(PreTrainedModel):
                config_class = transformers.LlamaConfig
                _supports_sdpa = True

                def __init__(self, config: Any) -> None:
                    super().__init__(config)
                    self.language_model = transformers.LlamaModel(config)

                @property
                def _supports_flash_attn_2(self) -> bool:
                    return bool(self.language_model._supports_flash_attn)

            for name in ("eager", "sdpa"):
                model = Composite._from_config(CAUSAL_LMS["llama"](), attn_implementation=name)
                assert model.config._attn_implementation == name
            assert model._supports_flash_attn is True

    def test_somebodys_word_for_all_models(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PreTrainedModel, "_supports_flash_attn", True)
        assert declared_flash_support(family("nothing")) is True
        assert declared_flash_support(family("legacy False")) is False
        with kernel_compat.installed():
            assert family("nothing")._supports_flash_attn is True
            assert family("legacy False")._supports_flash_attn is False

    def test_own_init_subclass(self) -> None:
        """The model's own `__init_subclass__` is still called with its arguments."""
        seen = []

        class Hooked(PreTrainedModel):
            def __init_subclass__(cls, word: str = "", **kwargs: Any) -> None:
                seen.append((cls.__name__, word))
                super().__init_subclass__(**kwargs)

        with kernel_compat.installed():

            class Child(Hooked, word="hello"):
                _supports_flash_attn_2 = True

            assert Child._supports_flash_attn is True
        assert seen == [("Child", "hello")]

    def test_pickle_and_copy(self, legacy_model: Path) -> None:
        with kernel_compat.installed():
            model = load(legacy_model, "eager", trust_remote_code=True)
            for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
                assert twin._supports_flash_attn is True
                torch.testing.assert_close(twin(ids()).logits, model(ids()).logits)
            native = transformers.AutoModelForCausalLM.from_config(CAUSAL_LMS["llama"]())
            assert pickle.loads(pickle.dumps(native))._supports_flash_attn is True

    def test_somebody_elses_flag_is_left_until_ours_is_back(self) -> None:
        made = family("legacy")
        with kernel_compat.installed():
            ours = vars(made)["_supports_flash_attn"]
            made._supports_flash_attn = False
            left = kernel_compat.uninstall().left_alone
            assert left == (f"{__name__}:M._supports_flash_attn (shim tf5_5_legacy_flag)",)
            assert vars(made)["_supports_flash_attn"] is False
            made._supports_flash_attn = ours
        kernel_compat.uninstall()
        assert "_supports_flash_attn" not in vars(made)


def rule(made: type) -> bool:
    """A second implementation of the rule: sort the flags of all classes by distance and take the first."""
    base = made.__mro__.index(PreTrainedModel)
    said = []
    for distance, ancestor in enumerate(made.__mro__):
        if ancestor is PreTrainedModel:
            continue
        said += (
            [(distance, 1, vars(ancestor)["_supports_flash_attn_2"])]
            if "_supports_flash_attn_2" in vars(ancestor)
            else []
        )
        declares = vars(ancestor).get("_supports_flash_attn")
        said += [(distance, 0, declares)] if isinstance(declares, bool) and distance < base else []
    return min(said)[2] if said else False


@only_bridged
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_hierarchy(data: st.DataObject) -> None:
    """Random classes, some made before `install()`; each reads by the rule, and after uninstalling as before."""
    flags = st.fixed_dictionaries(
        {}, optional={"_supports_flash_attn": st.booleans(), "_supports_flash_attn_2": st.booleans()}
    )
    mixins = [plain(f"Mixin{i}", **data.draw(flags)) for i in range(3)]
    made: list[Any] = [PreTrainedModel]

    def grow(count: int) -> None:
        for _ in range(count):
            parents = data.draw(st.lists(st.sampled_from([*made, *mixins]), min_size=1, max_size=3, unique=True))
            if not any(issubclass(parent, PreTrainedModel) for parent in parents):
                parents.append(data.draw(st.sampled_from(made)))
            try:
                made.append(type(f"Model{len(made)}", tuple(parents), data.draw(flags)))
            except TypeError:
                continue  # the bases have no consistent order

    grow(4)
    plainly = {one: one._supports_flash_attn for one in made}
    with kernel_compat.installed():
        grow(4)
        for one in made[1:]:
            assert one._supports_flash_attn is rule(one), (one.__mro__, [vars(k) for k in one.__mro__])
    for one, before in plainly.items():
        assert one._supports_flash_attn is before


@pytest.mark.slow
@only_bridged
def test_native_models_read_the_same() -> None:
    """Every model class of the release reads the same, imported before or after `install()`."""
    code = """
        import importlib, pkgutil
        import transformers.models
        from transformers import PreTrainedModel
        import kernel_compat

        def load(packages):
            for package in packages:
                module = importlib.import_module(f"transformers.models.{package}")
                for part in pkgutil.iter_modules(getattr(module, "__path__", ())):
                    if part.name.startswith("modeling_"):
                        try:
                            importlib.import_module(f"transformers.models.{package}.{part.name}")
                        except ModuleNotFoundError as error:  # a package it needs isn't here
                            assert not error.name.startswith("transformers"), error

        def classes(of=PreTrainedModel):
            for one in of.__subclasses__():
                yield one
                yield from classes(one)

        packages = [package.name for package in pkgutil.iter_modules(transformers.models.__path__)]
        load(packages[::2])
        with kernel_compat.installed() as report:
            assert report["tf5_5_legacy_flag"].state == "applied", report
            load(packages[1::2])
            bridged = {one: one._supports_flash_attn for one in classes()}
        changed = [one for one, flag in bridged.items() if one._supports_flash_attn is not flag]
        assert not changed, changed
        assert all(type(flag) is bool for flag in bridged.values())
        assert sum(bridged.values()) > 500, sum(bridged.values())
        print(len(bridged))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 1500
