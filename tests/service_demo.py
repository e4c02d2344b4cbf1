"""Fill a store so that every page of the service has data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from stored import SHIMS

from compat_matrix.axes import Axes, load
from compat_matrix.cells import Cell
from compat_matrix.expressions import Expression
from compat_matrix.results import CellResult, Figure, Kind, Test, Verdict
from compat_matrix.service.site import Site
from compat_matrix.service.submission import Submission
from compat_matrix.store import Store, documents, inserts, submissions
from compat_matrix.store.models import SUBMISSION

AXES = """
version = 1
[axes]
python = ["3.11", "3.12", "3.13"]
transformers = [
    "4.57", "5.0", "5.1", "5.2", "5.3", "5.4", "5.5", "5.6", "5.7", "5.8", "5.9", "5.10", "5.11",
    "5.12", "5.13", "5.14", "5.15", "5.16", "5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23",
]
torch = ["2.10", "2.11", "2.12", "2.13", "2.14", "2.15"]
flash_attention = ["none", "fa2", "fa4"]
device = ["cpu", "cuda"]
[[exclude]]
when = "device==cpu and flash_attention!=none"
because = "FlashAttention has kernels for CUDA alone"
[[exclude]]
when = "device==cuda and flash_attention==none"
because = "without FlashAttention the device makes no difference"
[[exclude]]
when = "flash_attention==fa2 and torch>=2.14"
because = "flash-attn compiles as C++17, and torch 2.14 and later need C++20"
[[tests]]
command = ["pytest"]
"""

LOG = """\x1b[1mtest session starts\x1b[0m
collected 87 items

tests/integration/test_decoders.py ........................F......  [ 38%]
tests/integration/test_architectures.py ..................F...F...  [ 79%]
"""

_WHY: dict[str, tuple[Kind, str]] = {
    "transformers==5.23 and torch>=2.14": ("wrong", "3 of 87 tests are off, by up to 0.31"),
    "transformers==5.22 and torch==2.15": ("wrong", "3 of 87 tests are off, by up to 0.31"),
    "transformers==5.23 and torch==2.10": ("seam", "tf5_loader: load_and_register_attn_kernel is gone"),
    "transformers==5.12 and torch==2.13": ("installation", "torch 2.13 requires triton==3.7, and 3.6 is there"),
    "transformers==5.2 and torch==2.11": ("crash", "Fatal Python error: Segmentation fault"),
    "transformers==5.0 and torch in (2.10, 2.11)": ("test", "2 of 87 tests failed, the first of them test_generate"),
    "transformers==4.57 and torch==2.15": ("import", "ImportError: cannot import name 'is_torch_fx_available'"),
    "transformers==5.17 and torch==2.12": ("timeout", "ended after 10 min, in test_compiled"),
}


class Demo(NamedTuple):
    """The ids of the demo's runs by kind, and their store."""

    runs: dict[str, str]
    store: Store


def fill(store: Store, folder: Path) -> Demo:
    """Store four runs, one of them executed now, and an atlas."""
    axes = write_axes(folder)
    now = datetime.now(timezone.utc)
    every = axes.cells
    cpu = [cell for cell in every if cell.device == "cpu" and cell.python != "3.13"]
    gpu = [cell for cell in every if cell.flash_attention == "fa4" and cell.python == "3.12"]
    excluded = {cell: why for cell, why in axes.all_cells.items() if why and cell.flash_attention == "fa2"}
    runs = {
        "old": store.new_run(
            cpu, label="nightly", command="run --label nightly", host="worker-1", revision="1f0c7d2ab9e4"
        ),
    }
    _add(store, runs["old"], (_old(cell, now - timedelta(days=3, minutes=len(cell.transformers))) for cell in cpu))
    store.finish(runs["old"], "finished")
    runs["gpu"] = store.new_run(gpu, excluded=excluded, label="gpu", command="run --only device==cuda", host="h200-4")
    there = (_not_run(one, now) if n % 31 == 7 else passed(one, now - timedelta(hours=20)) for n, one in enumerate(gpu))
    _add(store, runs["gpu"], there)
    store.finish(runs["gpu"], "finished")
    new = [cell for cell in cpu if cell.python == "3.12"]
    runs["new"] = store.new_run(
        new, label="nightly", command="run --label nightly", host="worker-1", revision="52754fa0c1d2"
    )
    _add(store, runs["new"], (_judged(cell, now - timedelta(hours=2, minutes=14)) for cell in new))
    store.finish(runs["new"], "finished")
    runs["running"] = _running(store, axes, now)
    documents.keep(store, "atlas", json.dumps(ATLAS))
    return Demo(runs, store)


def _add(store: Store, run: str, results: Iterable[CellResult]) -> None:
    """Add the results in one transaction, which takes half the time."""
    with store.writing() as connection:
        key = inserts.key(connection, run)
        for one in results:
            inserts.add_result(connection, key, one)


def write_axes(folder: Path) -> Axes:
    """Write an axes file and its project."""
    (folder / "pyproject.toml").write_text("[project]\nname = 'tested'\nversion = '1'\n")
    (folder / "axes.toml").write_text(AXES)
    return load(folder / "axes.toml")


def run_now(store: Store, run: str, cells: Iterable[Cell], since: datetime | None = None, log: str = "") -> None:
    """Let these cells of a submitted run, and no others, run now, with this end of their logs."""
    now = datetime.now(timezone.utc)
    running = {cell.name: ((since or now).isoformat(), log) for cell in cells}
    values = {"claim": "0" * 32, "host": "h200-4", "seen": now, "running": json.dumps(running)}
    with store.writing() as connection:
        own = SUBMISSION.c.run_id == inserts.key(connection, run)
        connection.execute(SUBMISSION.update().where(own).values(values))


def report(store: Store, run: str, result: CellResult) -> None:
    """Store the result of a cell that runs now."""
    store.add(run, result)
    left = {one.cell: one.since for one in submissions.running(store, run) if one.cell != result.cell}
    run_now(store, run, left, next(iter(left.values()), None))


def _running(store: Store, axes: Axes, now: datetime) -> str:
    """An unfinished run: one cell is done, and five run."""
    cells = [
        cell
        for cell in axes.cells
        if cell.device == "cpu"
        and (cell.python, cell.transformers) in (("3.12", "5.23"), ("3.12", "5.22"), ("3.13", "5.23"))
    ]
    run = (
        Site(store, axes).submit(Submission(cells=[cell.name for cell in cells], label="adopt: transformers 5.23")).run
    )
    store.add(run, passed(cells[0], now - timedelta(minutes=4)))
    pythons = [[cell for cell in cells[1:] if cell.python == python] for python in ("3.12", "3.13")]
    run_now(store, run, [*pythons[0][:3], *pythons[1][:2]], now - timedelta(seconds=40), LOG)
    return run


def _old(cell: Cell, when: datetime) -> CellResult:
    found = passed(cell, when)
    if (cell.python, cell.torch) != ("3.11", "2.11"):
        return found
    tolerated: dict[str, tuple[Verdict, str]] = {
        "5.21": ("flaky", "1 of 17 tests failed, and passed when repeated, the first of them test_generate"),
        "5.20": ("known", "1 of 17 tests fail, as is known: https://example.org/issues/1: a race in the cache"),
    }
    verdict, reason = tolerated.get(cell.transformers, (found.verdict, ""))
    return dataclasses.replace(found, verdict=verdict, reason=reason)


def _judged(cell: Cell, when: datetime) -> CellResult:
    found = next((why for only, why in _WHY.items() if Expression(only)(cell)), None)
    if found is None:
        return passed(cell, when)
    kind, reason = found
    tests = [*_tests(cell)]
    if kind in ("wrong", "test"):
        message = (
            "    def test_generate(name: str) -> None:\n>       torch.testing.assert_close(ours, theirs)\n"
            "E       AssertionError: Tensor-likes are not close!\nE\nE       Mismatched elements: 12 / 4096 (0.3%)\n"
            "E       Greatest absolute difference: 0.31 at index (0, 3, 17) (up to 1e-05 allowed)\n\n"
            "tests/integration/test_decoders.py:88: AssertionError"
        )
        tests[1:4] = [dataclasses.replace(one, outcome="failed", message=message) for one in tests[1:4]]
    else:
        tests = []
    return dataclasses.replace(
        passed(cell, when), verdict="failed", kind=kind, reason=reason, tests=tuple(tests), log=LOG + reason + "\n"
    )


def _tests(cell: Cell) -> Iterator[Test]:
    models = ("llama", "mistral", "qwen3", "gemma3", "gpt_oss", "olmo2", "phi3", "deepseek_v3")
    for n, model in enumerate(models * 2):
        name = f"tests/integration/test_decoders.py::test_generate[{model}-{n // len(models)}]"
        measured = n in (0, 5) and (cell.transformers, cell.torch) == ("5.23", "2.15")
        figures = (Figure(f"error of logits, {model}", 1e-6 + n / 1e7, ""),) if measured else ()
        yield Test(name, "passed", 0.05 + n / 9, figures=figures)
    yield Test("tests/integration/test_decoders.py::test_gpu", "skipped", 0.0, "no GPU")


def passed(cell: Cell, when: datetime) -> CellResult:
    packages = {f"package-{n}": f"1.{n}.0" for n in range(40)}
    packages |= {"torch": f"{cell.torch}.0", "transformers": f"{cell.transformers}.1", "kernel-compat": "0.1.0"}
    return CellResult(
        cell=cell,
        verdict="passed",
        kind=None,
        reason="",
        started=when,
        seconds=41.5,
        tests=tuple(_tests(cell)),
        environment={
            "packages": dict(sorted(packages.items())),
            "python": f"{cell.python}.9",
            "system": "Linux x86_64",
            "device": "cpu" if cell.device == "cpu" else "NVIDIA H200",
            "shims": SHIMS,
        },
        pins=f"torch=={cell.torch}.0 --hash=sha256:{'0' * 64}\n",
        command=("python", "-m", "pytest", "-m", "not slow", "tests/integration"),
        log=LOG,
    )


def _not_run(cell: Cell, now: datetime) -> CellResult:
    return CellResult(
        cell, "not run", "hardware", "it needs 1 GPU, and none is visible", now - timedelta(hours=20), 0.0
    )


_NAMES = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k"
ATLAS = {
    "releases": {
        "transformers": [{"version": f"4.{n}.0", "requires_python": ">=3.9"} for n in range(50, 58)]
        + [{"version": f"5.{n}.0", "requires_python": ">=3.10" if n < 21 else ">=3.11"} for n in range(24)],
        "torch": [{"version": f"2.{n}.0", "requires_python": ">=3.10"} for n in range(10, 16)],
    },
    "reads": [
        {
            "distribution": "transformers",
            "shim": "reads_models",
            "target": "transformers.cache_utils:Cache.update",
            "name": name,
            "releases": [f"5.{n}.0" for n in places],
        }
        for name, places in (("layer_idx", range(24)), ("cache_kwargs", [0, *range(3, 8)]), ("", [23]))
    ],
    "seams": [
        {
            "distribution": "transformers",
            "target": "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
            "history": [
                {"release": "4.50.0", "what": "there", "text": "= {}"},
                {"release": "4.51.0", "what": "changed", "text": "= AttentionInterface()"},
            ],
        },
        {
            "distribution": "transformers",
            "target": "transformers.modeling_flash_attention_utils:lazy_import_flash_attention",
            "shims": ["tf4_loader", "tf5_loader"],
            "history": [
                {"release": "4.55.0", "what": "appeared", "text": "(implementation)", "new": ["implementation"]},
                {
                    "release": "4.57.0",
                    "what": "changed",
                    "text": "(implementation, force_import=False)",
                    "new": ["force_import"],
                },
                {
                    "release": "5.3.0",
                    "what": "changed",
                    "text": "(implementation, attention_wrapper=None, allow_all_kernels=False)",
                    "new": ["attention_wrapper", "allow_all_kernels"],
                    "gone": ["force_import"],
                },
            ],
        },
        {
            "distribution": "transformers",
            "target": "transformers.modeling_flash_attention_utils:lazy_import_paged_flash_attention",
            "shims": ["tf5_paged"],
            "history": [
                {"release": "5.0.0", "what": "appeared", "text": "(implementation)", "new": ["implementation"]},
                {"release": "5.19.0", "what": "vanished", "text": "nothing", "gone": ["implementation"]},
            ],
        },
        {
            "distribution": "transformers",
            "target": "transformers.modeling_utils:PreTrainedModel._supports_flash_attn_2",
            "shims": ["tf4_loader"],
            "history": [],  # removed before the first release
        },
        {
            "distribution": "torch",
            "target": "torch.nn.attention.varlen:varlen_attn",
            "shims": ["torch2_11"],
            "history": [
                {"release": "2.10.0", "what": "there", "text": f"({_NAMES}, is_causal=False)"},
                {
                    "release": "2.11.0",
                    "what": "changed",
                    "text": f"({_NAMES}, *, scale=None, window_size=(-1, -1))",
                    "new": ["scale", "window_size"],
                    "gone": ["is_causal"],
                },
            ],
        },
    ],
    "check": {
        "disagreements": [
            {
                "shim": "tf5_paged",
                "target": "transformers.modeling_flash_attention_utils:lazy_import_paged_flash_attention",
                "release": "5.19.0",
                "expected": "(implementation, ...)",
                "found": "nothing",
                "certain": True,
            }
        ]
    },
    "notes": [],
}
