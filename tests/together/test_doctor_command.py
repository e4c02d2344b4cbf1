"""``kernel-compat doctor`` beside torch, which the doctor's own tests do without."""

from __future__ import annotations

from command_line import imports_nothing_heavy


def test_it_imports_nothing_heavy() -> None:
    imports_nothing_heavy(["doctor"])
