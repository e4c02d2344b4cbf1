"""The question of the first page, which a script reads. In a report it also finds the answer, which Python finds in a service."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

from asked import answered_alike, script
from stored import cells, failed, passed, stored

from compat_matrix.cells import Cell, spelled
from compat_matrix.pages import ask
from compat_matrix.results import Kind
from compat_matrix.store import Store
from compat_matrix.views.verdicts import Answer, Judge, wanted

#: A field, what is typed, and what it is; or a part of the error.
TYPED = [
    ("transformers", "5.9.1", "5.9.1"),
    ("transformers", "v5.9", "5.9"),
    ("transformers", "  transformers==5.9.1 ", "5.9.1"),
    ("transformers", "transformers 5.9.1,", "5.9.1"),
    ("transformers", "5.9.0rc1", "5.9.0rc1"),
    ("transformers", "5.10.0.dev0", "5.10.0.dev0"),
    ("torch", "2.11.0+cu130", "2.11.0"),
    ("torch", "2.11.0 cu130", "2.11.0"),
    ("torch", "torch-2.11", "2.11"),
    ("flash-attn", "flash-attn 2.8.3", "fa2 2.8.3"),
    ("flash-attn", "flash_attn==2.8.3", "fa2 2.8.3"),
    ("flash-attn", "2.8.3", "fa2 2.8.3"),
    ("flash-attn", "FlashAttention-3", "fa3"),
    ("flash-attn", "fa3-fwd==0.0.3", "fa3 0.0.3"),
    ("flash-attn", "flash-attn-4 4.0.0b36", "fa4 4.0.0b36"),
    ("flash-attn", "flash-attn 2.8.3+cu12torch2.11", "fa2 2.8.3"),
    ("flash-attn", "fa2 2.7", "fa2 2.7"),
    ("flash-attn", "flash-attn 2", "fa2"),
    ("flash-attn", "fa4", "fa4"),
    ("flash-attn", "torch", "torch"),
    ("flash-attn", "none", "none"),
    ("device", "cuda", "cuda"),
    ("python", "3.12", "3.12"),
    ("python", "Python 3.12.4", "3.12.4"),
    ("python", "cp312", "3.12"),
    ("python", "python3.11", "3.11"),
    ("transformers", "five", "'five' isn't a release such as 5.9.1"),
    ("transformers", "torch==2.11", "'torch==2.11' isn't a release such as 5.9.1"),
    ("torch", ">=2.4", "'>=2.4' is a range: one release, such as 2.11.0+cu130"),
    ("torch", "2.11.0, 2.12.0", "'2.11.0, 2.12.0' is a range: one release, such as 2.11.0+cu130"),
    ("flash-attn", "flash", "'flash' isn't a FlashAttention such as flash-attn 2.8.3, fa4, torch or none"),
    ("flash-attn", "flash-attn 1.0.9", "fa1 1.0.9"),
    ("python", "three", "'three' isn't a release such as 3.12"),
]

LOCK = """
[[package]]
name = "flash-attn"
version = "2.8.3"
source = { registry = "https://index.example/simple" }

[[package]]
name = "torch"
version = "2.11.0+cu130"
dependencies = [
    { name = "transformers" },
]

[[package]]
name = "transformers"
version = "5.9.1"
"""

NO_RELEASE = "isn't a release, and only releases are tested: type the one that it is made from"

#: A pasted text, and its fields or the error.
PASTED: list[tuple[str, dict[str, str] | str]] = [
    (
        "numpy==2.3\ntorch==2.11.0+cu130\ntransformers==5.9.1\n",
        {"transformers": "5.9.1", "torch": "2.11.0+cu130", "flash-attn": "none"},
    ),
    ("Torch == 2.11.0 ; python_version < '3.14'\n", {"transformers": "", "torch": "2.11.0", "flash-attn": "none"}),
    (
        "transformers[torch]==5.9.1 \\\n    --hash=sha256:00\n",
        {"transformers": "5.9.1", "torch": "", "flash-attn": "none"},
    ),
    (
        "Package      Version\n------ ----\nflash_attn   2.8.3\ntorch        2.11.0\n",
        {"transformers": "", "torch": "2.11.0", "flash-attn": "flash-attn 2.8.3"},
    ),
    (
        "flash_attn @ file:///wheels/flash_attn-2.8.3%2Bcu12torch2.11-cp312-cp312-linux_x86_64.whl#sha256=0\ntorch==2.11.0",
        {"transformers": "", "torch": "2.11.0", "flash-attn": "flash-attn 2.8.3+cu12torch2.11"},
    ),
    (LOCK, {"transformers": "5.9.1", "torch": "2.11.0+cu130", "flash-attn": "flash-attn 2.8.3"}),
    ("torch>=2.4\n", "torch>=2.4 is a range: type the release that you have"),
    (
        "transformers @ git+https://example.org/transformers\n",
        f"transformers @ git+https://example.org/transformers {NO_RELEASE}",
    ),
    (
        "torch==2.11.0\n-e git+https://example.org/huggingface/transformers@0a1b#egg=transformers\n",
        f"-e git+https://example.org/huggingface/transformers@0a1b#egg=transformers {NO_RELEASE}",
    ),
    ("torch==2.11.0\n-e /home/me/transformers\n", f"-e /home/me/transformers {NO_RELEASE}"),
    (
        "torch==2.11.0\ngit+https://example.org/Dao-AILab/flash-attention.git@v2.8.3\n",
        f"git+https://example.org/Dao-AILab/flash-attention.git@v2.8.3 {NO_RELEASE}",
    ),
    (
        "torch==2.11.0\n-e git+https://example.org/me/kernels@0a1b#egg=my_kernels\n-e .\n",
        {"transformers": "", "torch": "2.11.0", "flash-attn": "none"},
    ),
    ("torch==2.10.0\ntorch==2.11.0\n", "torch is there as 2.10.0 and 2.11.0: type the one that you have"),
    (
        "torch==2.11.0\nflash-attn==2.8.3\nflash-attn-4==4.0.0b36\n",
        "flash-attn 2.8.3 and flash-attn-4 4.0.0b36 are there: type the one that you use",
    ),
    ("numpy==2.3\n", "neither transformers nor torch is in this text, as in the line torch==2.11.0"),
    ("import torch\nassert torch\n", "neither transformers nor torch is in this text, as in the line torch==2.11.0"),
]


FIELDS = {axis: [spelled(axis), example] for axis, example in ask.FIELDS.items()}


def _read(asked: list[dict[str, str]]) -> Any:
    empty = {"transformers": "", "torch": "", "flash-attn": "", "device": "", "python": "", "text": ""}
    fields = json.dumps(FIELDS)
    return script(f"{json.dumps([empty | one for one in asked])}.map((one) => read(one, {fields}))")


def test_what_people_type() -> None:
    axes = {str(name): axis for axis, (name, _) in FIELDS.items()}
    read = _read([{name: text} for name, text, _ in TYPED])
    for one, (name, text, said) in zip(read, TYPED, strict=True):
        assert one["typed"][name] == text  # what can't be read is kept
        asked = {axis: value for axis, value in one["asked"].items() if value}
        assert (one["errors"].get(name) or " ".join(asked.values())) == said
        if not one["errors"]:  # the service takes it
            assert wanted({axes[name]: said}) == asked
            assert name != "flash-attn" or wanted({axes[name]: text}) == asked  # without the script, too


def test_what_people_paste() -> None:
    read = _read([{"text": text} for text, _ in PASTED])
    for one, (_, said) in zip(read, PASTED, strict=True):
        assert (
            one["errors"].get("text") or {name: one["typed"][name] for name in ("transformers", "torch", "flash-attn")}
        ) == said


def test_what_is_typed_after_an_error_in_the_text_clears_it() -> None:
    broken = "torch>=2.4\n-e /home/me/transformers\nflash-attn==2.8.3\nflash-attn-4==4.0.0b36\n"
    fields = {"torch": "2.12", "transformers": "5.9.1", "flash-attn": "fa2"}
    for left in fields:
        (found,) = _read([{"text": broken, **{name: text for name, text in fields.items() if name != left}}])
        assert [*found["errors"]] == ["text"]
    (found,) = _read([{"text": broken, **fields}])
    assert (found["errors"], found["typed"]["torch"]) == ({}, "2.12")
    (found,) = _read([{"text": "numpy==2.3", "torch": "2.12"}])
    assert not found["errors"]


def test_a_field_counts_more_than_the_text() -> None:
    (found,) = _read([{"torch": "2.12", "text": "torch==2.11.0\ntransformers==5.9.1"}])
    asked = {"transformers": "5.9.1", "torch": "2.12", "flash_attention": "none"}
    assert {axis: value for axis, value in found["asked"].items() if value} == asked


def test_the_script_and_the_service_answer_the_same(tmp_path: Path) -> None:
    """For every combination of some values of each axis: the verdict, its evidence and the nearest that works."""
    every = cells(("5.8", "5.9", "5.9.2", "5.10"), ("2.10", "2.11"), ("3.11", "3.12"))
    every += cells(("5.9",), ("2.11",), flash_attention="fa4", device="cuda")
    kinds: list[Kind] = ["wrong", "crash", "test"]
    results = [
        failed(one, kinds[n % 3], f"it fails: {n}") if n % 4 == 1 else passed(one) for n, one in enumerate(every)
    ]
    own = [
        Cell("3.12", "5.9", "2.12", extra=(("backend", backend), ("peft", peft)))
        for backend in ("gloo", "nccl")
        for peft in ("0.9", "0.10")
    ]
    with Store.open(str(tmp_path / "store.db")) as store:
        excluded = dict.fromkeys(cells(("5.8",), ("2.10",), ("3.10",)), "needs Python 3.11")
        run = store.new_run([*every, *own], excluded=excluded)
        for one in results:
            store.add(run, one)
        stored(store, [passed(own[0]), failed(own[3]), passed(own[2])])
        judge = Judge(store)
        values = {
            "transformers": ("", "5.9.1", "5.9", "5.9.2", "5.12.0", "4.57.1", "5.9.0rc1"),
            "torch": ("", "2.11.0", "2.10", "2.13.1"),
            "flash_attention": ("", "none", "fa4"),
            "python": ("", "3.12", "3.10", "3.11.9"),
        }
        asked = [dict(zip(values, some, strict=True)) for some in product(*values.values())][1:]
        asked += [
            {"peft": peft, "backend": backend} for peft in ("", "0.9", "0.10.1", "1.0") for backend in ("gloo", "mpi")
        ]
        answered_alike(judge, asked)


def test_an_answer_has_the_nearest_that_works(tmp_path: Path) -> None:
    every = cells(("5.8", "5.9", "5.10"), ("2.10", "2.11"))
    with Store.open(str(tmp_path / "store.db")) as store:
        run = stored(store, [failed(one, "crash", "it died") if one.torch == "2.11" else passed(one) for one in every])

        def answer(**asked: str) -> Answer:
            return Judge(store)(wanted(asked))

        bad = answer(transformers="5.9.1", torch="2.11.0")
        assert (bad.verdict, bad.kind, bad.closeness, bad.reason) == ("failed", "crash", "patch", "it died")
        assert bad.works
        assert bad.works.cell.name == "py312-tf5.9-torch2.10"
        assert [one.axis for one in bad.works.differs] == ["torch"]
        assert (bad.evidence[0].run, bad.evidence[0].kind) == (run, "crash")
        other = answer(transformers="5.12", torch="2.10")
        assert (other.verdict, other.closeness) == ("unknown", "neighbour")
        assert other.works
        assert other.works.cell.name == "py312-tf5.10-torch2.10"
        assert other.against == []
        against = answer(transformers="5.12", torch="2.11", python="3.12").against
        assert [one.cell.name for one in against] == ["py312-tf5.10-torch2.11"]
        store.new_run([], excluded=dict.fromkeys(cells(("5.9",), ("2.11",), ("3.10",)), "needs Python 3.11"))
        refused = answer(transformers="5.9", torch="2.11", python="3.10", flash_attention="none", device="cpu")
        assert (refused.verdict, refused.closeness, refused.reason, refused.evidence) == (
            "refused",
            "rule",
            "needs Python 3.11",
            [],
        )
