"""Tiny configs, outcomes and the command's arguments, without a real model."""

from __future__ import annotations

import itertools
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from kernel_compat import cli
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.proofs import table
from kernel_compat_prove import CASES, QUICK, Outcome, Proof, losses, summary
from kernel_compat_prove.outcomes import Verdict
from kernel_compat_prove.proof import require_cases
from kernel_compat_prove.record import record
from kernel_compat_prove.subject import is_refusal
from kernel_compat_prove.tiny import LEVELS, VOCABULARY, WINDOW, Level, shrink
from kernel_compat_prove.weights import perturbed, randomize


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


@pytest.mark.parametrize(
    ("heads", "keys", "grouped", "expected"),
    [(32, 32, True, 2), (32, 32, False, 4), (2, 2, True, 1), (1, 1, True, 1), (32, 1, True, 1), (32, 8, False, 2)],
)
def test_heads_of_keys(heads: int, keys: int, grouped: bool, expected: int) -> None:
    config = text(num_attention_heads=heads, num_key_value_heads=keys)
    assert shrink(config, level=Level(grouped=grouped)).num_key_value_heads == expected


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
    unloaded = Proof("e", "5.0.0", (Outcome("E", "load", "refused"),))  # another release of this library may load it
    others = [Proof("b", "5.0.0", PROOF.outcomes[:1]), Proof("c", "5.0.0", no_recipe="none"), unloaded]
    record([PROOF, refuses, *others], file)
    record([Proof("a", "5.1.0", PROOF.outcomes[:1])], file)
    monkeypatch.setattr(table, "_table", lambda: table.read(file)[0])
    assert table.releases() == ["5.0", "5.1"]
    assert table.known("5.0.2") == {
        "a": {"refused": ("padded_holes",)},
        "b": {},
        "c": {"no recipe": ()},
        "e": {"refused": ("load",)},
        "llama": {"wrong": ("packed_mask",), "refused": ("padded_holes",)},
    }
    assert table.known("5.1.0") == {"a": {}}
    assert table.known("6.0.0") == {}
    found = [table.wrong_cases(name, "5.0.0") for name in ("a", "b", "c", "llama", "d", "e")]
    assert found == [(), (), None, ("packed_mask",), None, None]


def proof_of(cases: dict[str, tuple[Verdict, int, bool]], release: str = "5.1.0", model_type: str = "a") -> Proof:
    """A proof with outcomes of class A: the verdict, the number of comparisons, and whether eager attention disagrees with itself."""
    outcomes = [Outcome("A", case, verdict, compared=n, apart=apart) for case, (verdict, n, apart) in cases.items()]
    return Proof(model_type, release, tuple(outcomes))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table with release 5.0: a class with cases of each kind, and a type that couldn't be loaded."""
    file = tmp_path / "table.json"
    ran: dict[str, tuple[Verdict, int, bool]] = {
        "plain": ("equal", 1, False),
        "cached": ("equal", 2, False),
        "packed_mask": ("refused", 1, False),
        "beams": ("equal", 1, True),
        "image": ("not applicable", 0, False),
        "mask_4d": ("untested", 0, False),
    }
    unloadable = Proof("b", "5.0.0", (Outcome("B", "load", "refused"),))
    record([proof_of(ran, "5.0.0"), unloadable], file)
    for name, number in (("_table", 0), ("cases_that_ran", 1)):
        monkeypatch.setattr(table, name, lambda number=number: table.read(file)[number])
    monkeypatch.setattr(losses, "ACCEPTED", tmp_path / "lost.json")
    monkeypatch.setattr(losses, "_reviewed", lambda: json.loads((tmp_path / "lost.json").read_text()))
    (tmp_path / "lost.json").write_text("{}")
    return file


RAN: dict[str, tuple[Verdict, int, bool]] = {
    "plain": ("equal", 1, False),
    "cached": ("equal", 2, False),
    "packed_mask": ("equal", 1, False),
    "beams": ("equal", 1, True),
}


def lost(proof: Proof, cases: list[str] | None = None) -> list[str]:
    return [one.case for one in losses.with_losses(proof, cases).outcomes if one.verdict == "lost"]


def test_nothing_is_lost_where_the_same_cases_run(recorded: Path) -> None:
    assert lost(proof_of(RAN)) == []
    assert lost(proof_of(RAN, "4.57.6")) == []  # older than the table knows


@pytest.mark.parametrize(
    ("case", "now"),
    [
        ("cached", ("not applicable", 0, False)),  # its argument was renamed
        ("cached", ("untested", 0, False)),
        ("cached", ("equal", 1, False)),  # one comparison of two
        ("plain", ("equal", 1, True)),  # eager attention has become wrong as well
        ("packed_mask", ("not applicable", 0, False)),  # it ran, though it was refused
    ],
)
def test_a_case_that_ran_and_does_not_is_lost(recorded: Path, case: str, now: tuple[Verdict, int, bool]) -> None:
    found = proof_of({**RAN, case: now})
    assert found.ok
    assert lost(found) == [case]
    assert lost(found, ["beams"]) == []
    assert losses.with_losses(found).verdict == "lost"
    assert not losses.with_losses(found).ok


def test_what_is_worse_than_lost_stays(recorded: Path) -> None:
    verdicts: tuple[Verdict, ...] = ("wrong", "crashed")
    for verdict in verdicts:
        assert losses.with_losses(proof_of({**RAN, "cached": (verdict, 1, False)})).verdict == verdict


def test_a_class_is_lost_as_a_whole(recorded: Path) -> None:
    assert lost(Proof("a", "5.1.0", no_recipe="no inputs found")) == ["all"]
    assert lost(Proof("a", "5.1.0", (Outcome("Other", "plain", "equal", compared=1),))) == ["all"]
    refused = Proof("a", "5.1.0", (Outcome("A", "load", "refused"),))  # no model of it can be loaded: nothing is silent
    missing = Proof("a", "5.1.0", no_recipe="it needs timm, but it was not found in your environment")
    assert lost(refused) == lost(missing) == []


def test_a_reviewed_loss_is_accepted_between_its_releases(recorded: Path) -> None:
    found = {name: RAN[name] for name in RAN if name != "cached"}
    (recorded.parent / "lost.json").write_text('{"a": {"5.2": {"cached": "it has no cache any more"}}}')
    assert lost(proof_of(found, "5.1.0")) == ["cached"]
    assert lost(proof_of(found, "5.2.0")) == lost(proof_of(found, "5.3.0")) == []
    assert lost(proof_of({**found, "plain": ("untested", 0, False)}, "5.2.0")) == ["plain"]


def test_types_that_are_gone(recorded: Path) -> None:
    assert [name for name, _ in losses.vanished(["a"], "5.1.0")] == ["b"]
    (recorded.parent / "lost.json").write_text('{"b": {"5.1": {"all": "part of a"}}}')
    assert losses.vanished(["a"], "5.1.0") == []


def test_the_table_itself_loses_nothing_that_was_not_reviewed() -> None:
    """From each release to the next: all types, and the cases that ran where both are known."""
    releases = table.releases()
    for before, release in itertools.pairwise(releases):
        gone = table._table()[before].keys() - table._table()[release].keys()
        assert {name for name in gone if not losses._accepted(name, "all", before, release)} == set(), release
    known = sorted(table.cases_that_ran(), key=Version)
    for before, release in itertools.pairwise(known):
        for name, classes in table.cases_that_ran()[before].items():
            now, verdicts = table.cases_that_ran()[release].get(name, {}), table.known(release).get(name, {})
            for owner, entries in classes.items():
                if "load" in verdicts.get("refused", ()) and owner not in now:
                    continue
                there = {one.rstrip("?").partition("*")[0]: one for one in now.get(owner, ())}
                for entry in entries:
                    case, count, apart = taken_apart(entry)
                    _, compared, disagrees = taken_apart(there.get(case, f"{case}*0"))
                    found = Outcome(owner, case, "equal", compared=compared, apart=disagrees)
                    assert not losses._loss(found, count, apart, before) or losses._accepted(
                        name, case, before, release
                    ), (name, owner, release, entry)


def taken_apart(entry: str) -> tuple[str, int, bool]:
    """A case that ran, as in the table: its name, the number of comparisons, and whether eager attention disagrees."""
    case, _, count = entry.rstrip("?").partition("*")
    return case, int(count or 1), entry.endswith("?")


def test_what_ran_is_kept_for_each_release_in_the_file(recorded: Path) -> None:
    record([proof_of(RAN, "5.1.0")], recorded)
    record([proof_of(RAN, "5.2.0")], recorded)
    ran = table.read(recorded)[1]
    assert ran["5.0"] == {"a": {"A": ["plain", "cached*2", "packed_mask", "beams?"]}}
    assert ran["5.1"] == ran["5.2"] == ran["5.0"]
    assert '"a": {"5.0-5.2": {"A": 0}}' in recorded.read_text()
