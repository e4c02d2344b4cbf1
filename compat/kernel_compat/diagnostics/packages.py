"""Broken installs: whether torch and transformers can be imported, and why not.

What the packages' metadata shows is in `Environment.problems`; this module imports the packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..environment import Environment

__all__ = ["Imports", "import_frameworks", "one_line"]


@dataclass(frozen=True)
class Imports:
    """The result of importing torch and transformers.

    Attributes:
        failed: by distribution, in a few words, why it can't be imported; empty if both can.
        problems: a sentence for each one that is installed and raises on import.
        missing: a sentence for each one that isn't installed, with the command that installs it.
    """

    failed: Mapping[str, str]
    problems: tuple[str, ...]
    missing: tuple[str, ...]


def import_frameworks(environment: Environment) -> Imports:
    """Import torch, then transformers.

    transformers is not imported if torch can't be: it has no attention without torch.
    """
    failed: dict[str, str] = {}
    problems: list[str] = []
    missing: list[str] = []
    for distribution, module in (("torch", "torch"), ("transformers", "transformers.modeling_utils")):
        if distribution not in environment.packages and distribution not in environment.imports:
            failed[distribution] = f"{distribution} is not installed"
            missing.append(f"{distribution} is not installed: pip install {distribution}")
        elif not failed:
            try:
                importlib.import_module(module)
            except Exception as error:  # a broken install may raise anything
                failed[distribution] = f"{distribution} does not import"
                problems.append(f"{distribution} is installed but does not import ({one_line(error)})")
    return Imports(failed, tuple(problems), tuple(missing))


def one_line(error: BaseException) -> str:
    """An exception's type and message on one line, at most 400 characters of it: kernel compilers write pages."""
    text = " ".join(str(error).split())
    if len(text) > 400:
        text = text[:397] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
