"""The commands that install the distributions, as the documents have them: one switch for the day they are on a package index."""

from __future__ import annotations

#: Whether the distributions are on a package index. Until they are, the commands that install them read a clone of the repository,
#: at the address in the environment variable KERNEL_COMPAT.
PUBLISHED = False

#: The commands that install the distributions elsewhere than in a checkout: from an index, and until then.
_FROM_GIT = 'python3 -m pip install -q uv && python3 -m uv pip install --python python3 "{0} @ git+$KERNEL_COMPAT{1}"'
INSTALLS = {
    'python3 -m pip install "kernel-compat[all]"': _FROM_GIT.format("kernel-compat[all]", ""),
    "python3 -m pip install kernel-compat-atlas": _FROM_GIT.format("kernel-compat-atlas", "#subdirectory=atlas"),
    "python3 -m pip install kernel-compat-matrix": _FROM_GIT.format("kernel-compat-matrix", "#subdirectory=matrix"),
    "python3 -m pip install 'kernel-compat-matrix[ray]'": _FROM_GIT.format(
        "kernel-compat-matrix[ray]", "#subdirectory=matrix"
    ),
}

#: What docs/installing.md says until then.
BEFORE = """
The distributions aren't on a package index yet. `KERNEL_COMPAT` stands for the address of this repository, or the path of a clone as
`file:///...`, in workflows for a variable of your repository; [uv](https://docs.astral.sh/uv/) finds each distribution's neighbours in the same repository. In a checkout,
`uv sync --extra all` installs them.
"""


def installs(text: str) -> str:
    """A document with the commands that install the distributions today."""
    for published, before in INSTALLS.items():
        in_workflow = "- run: " + before.replace("$KERNEL_COMPAT", "${{ vars.KERNEL_COMPAT }}")
        for from_git, from_index in ((in_workflow, f"- run: {published}"), (before, published)):
            text = text.replace(from_git, from_index) if PUBLISHED else text.replace(from_index, from_git)
    return text
