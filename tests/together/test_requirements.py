"""Requirements of kernels and of installed packages, read by two neighbours of the core."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernel_compat import Environment
from kernel_compat_doctor.distributions import Installed
from kernel_compat_ops.spec import KernelSpec


@pytest.mark.parametrize(
    ("version", "fits"), [("2.14.0a0+abc.nv26.06", True), ("2.13.1", False), ("2.14.0.dev1", True)]
)
def test_requirements_of_kernels_and_of_installed_packages_follow_the_rule(version: str, fits: bool) -> None:
    kernel = KernelSpec("rms_norm", "standard", "any", lambda: print, requires=("torch>=2.14",))
    assert bool(kernel.absent_because(Environment(packages={"torch": version}))) is not fits
    package = Installed("any", "1", Path(), None, SpecifierSet(">=2.14"))
    assert package.refuses(Version(version)) is not fits
