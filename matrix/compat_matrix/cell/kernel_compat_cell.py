"""A pytest plugin that runs inside a cell: reports its packages and shims, gives each pytest worker a GPU, and has the fixture `figure`.

It is on the path of a cell's Python, which has nothing else of the matrix, and imports only modules that pytest imports too.
`kernel_compat_versions` is a link to the library's `kernel_compat/versions.py`: a cell need not have the library.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Literal

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if __package__:  # outside a cell
    from .kernel_compat_versions import within
else:
    from kernel_compat_versions import within  # type: ignore[import-not-found, no-redef]


def pytest_configure() -> None:
    """Give this pytest worker one of the leased GPUs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    leased = os.environ.get("CUDA_VISIBLE_DEVICES")
    if worker and leased:  # before anything uses a device
        gpus = leased.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


def pytest_sessionfinish() -> None:
    """Describe this process' environment as JSON in the file that ``COMPAT_MATRIX_ENVIRONMENT`` names; pytest workers don't."""
    target = os.environ.get("COMPAT_MATRIX_ENVIRONMENT")
    if not target or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    there = installed()
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: distribution.version for name, distribution in there.items()},
        "conflicts": conflicts(there),
        **shims(),  # imports torch, which otherwise only pytest's workers have imported
        **device(),
    }
    scratch = Path(f"{target}.part")
    scratch.write_text(json.dumps(found, default=str), encoding="utf-8")
    scratch.replace(target)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record a number that the test measured: ``figure("step time", 12.5, "ms")``.

    Its name is unique among the tests of a cell: that of a parametrized test has to contain the parameter. The number is a finite one,
    or anything that `float` accepts, such as a tensor of one element. ``better`` says which numbers are better: "lower", "higher", or None if neither are.
    """

    def record(name: str, value: Any, unit: str, better: Literal["lower", "higher"] | None = "lower") -> None:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"the figure {name!r} is {number}, and has to be finite")
        record_property("figure", {"name": name, "value": number, "unit": unit, "better": better})

    return record


def installed() -> dict[str, Distribution]:
    """The installed distributions by normalized name; of several, the first on the path is used."""
    backwards = reversed([*distributions()])
    found = {canonicalize_name(name): one for one in backwards if (name := one.metadata["Name"])}
    return dict(sorted(found.items()))


def conflicts(there: dict[str, Distribution]) -> list[str]:
    """The unmet requirements of installed packages; there may be some, as base and layer are resolved separately."""
    found = []
    for name, distribution in there.items():
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            needed = there.get(canonicalize_name(requirement.name))
            if needed is None or not within(needed.version, requirement.specifier):
                version = "nothing" if needed is None else needed.version
                found.append(f"{name} {distribution.version} requires {requirement}, and {version} is there")
    return found


def device() -> dict[str, str]:
    """The name, compute capability and driver of the GPU, or the name of the CPU; doesn't import torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {"device": platform.processor() or "cpu"}
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    except Exception as error:  # the driver's version is only informative
        driver = f"unknown: {error}"
    capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return {"device": torch.cuda.get_device_name(0), "capability": capability, "driver": driver}


def shims() -> dict[str, Any]:
    """The library's report on its shims, with every seam verified."""
    if "transformers" not in sys.modules:
        return {}
    try:
        import kernel_compat
    except ImportError:
        return {}
    with kernel_compat.installed() as report:
        found = {}
        for one in report.shims:
            found[one.name] = {"state": one.state, "reason": one.reason, "seams": [*map(str, one.seams)]}
        return {"shims": found}
