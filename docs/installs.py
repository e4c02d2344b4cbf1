"""The commands that install the distributions, as the documents have them: one switch for the day they are on a package index."""

from __future__ import annotations

import re

#: Whether the distributions are on a package index. Until they are, the commands that install them read a clone of the repository,
#: at the address in the environment variable KERNEL_COMPAT_SOURCE.
PUBLISHED = False

#: What the documents install elsewhere than in a checkout, with its folder in the repository.
FOLDERS = {
    **dict.fromkeys([f"kernel-compat[{extra}]" for extra in ("all", "doctor", "ops", "prove", "run")], ""),
    "kernel-compat-atlas": "#subdirectory=atlas",
    "kernel-compat-matrix": "#subdirectory=matrix",
    "kernel-compat-matrix[ray]": "#subdirectory=matrix",
}


def _from_index(name: str) -> str:
    return f'python3 -m pip install "{name}"' if "[" in name else f"python3 -m pip install {name}"


def _from_git(name: str, folder: str) -> str:
    return f'python3 -m pip install -q uv && python3 -m uv pip install --python python3 "{name} @ git+$KERNEL_COMPAT_SOURCE{folder}"'


#: The commands that install from an index, and those until then.
INSTALLS = {_from_index(name): _from_git(name, folder) for name, folder in FOLDERS.items()}

#: What docs/installing.md says until then.
BEFORE = """
The distributions aren't on a package index yet. Set `KERNEL_COMPAT_SOURCE` to the address of this repository, or to the path of a clone as
`file:///...`; [uv](https://docs.astral.sh/uv/) finds each distribution's neighbours in the same repository. Workflows read the variable of
this name of your repository (Settings, Secrets and variables, Actions, Variables). In a checkout, `uv sync --extra all` installs them.
"""

#: What documents with such a command say until then, with the way to docs/installing.md, and what those with a workflow say.
ADDRESS = " Until kernel-compat is on a package index, set `KERNEL_COMPAT_SOURCE` to [the address of its repository or of a clone]({})."
VARIABLE = " Until kernel-compat is on a package index, `KERNEL_COMPAT_SOURCE` is a [variable of your repository]({}) with that address."

#: The start of a command that installs from an index, unless it names folders or files.
_INSTALLER = (
    r"(?:\bpipx? (?:install|download|run)|\bpip wheel|\buvx|\buv (?:add|pip install|tool (?:run|install))|--with)"
)
_ANY = re.compile(rf"{_INSTALLER}\b[^&|;]*\bkernel-compat(?!/)")


def installs(text: str) -> str:
    """A document with the commands that install the distributions today."""
    for published, before in INSTALLS.items():
        for from_git, from_index in ((_in_workflow(before), f"- run: {published}"), (before, published)):
            text = text.replace(from_git, from_index) if PUBLISHED else text.replace(from_index, from_git)
    return text


def _in_workflow(command: str) -> str:
    return f"- run: {command.replace('$KERNEL_COMPAT_SOURCE', '${{ vars.KERNEL_COMPAT_SOURCE }}')}"


def commands(text: str) -> list[str]:
    """The lines of a document that install one of the distributions, as written, without the start of a workflow's step."""
    return [line.strip() for line in text.splitlines() if _ANY.search(line)]


def others(text: str) -> list[str]:
    """Those of `commands` that fail today."""
    today = INSTALLS if PUBLISHED else INSTALLS.values()
    good = {*today, *map(_in_workflow, today)}
    return [line for line in commands(text) if line not in good]
