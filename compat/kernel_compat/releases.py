"""The upstream releases that kernel-compat supports: the one list of them.

The installer, noxfile.py, the matrix, the documentation and the tests read it. A new release is one more line here, and a
shim where `kernel-compat status` reports a changed seam. This module imports nothing: noxfile.py runs it by its path.
"""

#: The newest patch of every supported minor release of transformers, oldest first, and where it is tested besides the matrix:
#: "ci" (every run of nox), "versions" (`nox -s versions` alone) or "".
TRANSFORMERS = {
    "4.54.1": "versions",
    "4.55.4": "versions",
    "4.56.2": "versions",
    "4.57.6": "ci",
    "5.0.0": "ci",
    "5.1.0": "",
    "5.2.0": "versions",
    "5.3.0": "versions",
    "5.4.0": "versions",
    "5.5.4": "",
    "5.6.2": "",
    "5.7.0": "",
    "5.8.1": "",
    "5.9.0": "versions",
    "5.10.4": "",
    "5.11.0": "",
    "5.12.1": "",
    "5.13.1": "",
    "5.14.1": "",
    "5.15.1": "",
    "5.16.1": "versions",
    "5.17.0": "versions",
    "5.18.0": "",
    "5.19.0": "versions",
    "5.20.2": "",
    "5.21.1": "",
    "5.22.2": "versions",
    "5.23.0": "versions",
    "5.24.0": "versions",
}

#: The same of torch, from the first release with variable-length attention; "ci" or "torches" (`nox -s torches` alone).
TORCH = {
    "2.10.0": "ci",
    "2.11.0": "torches",
    "2.12.1": "torches",
    "2.13.0": "torches",
    "2.14.1": "torches",
    "2.15.0": "torches",
}


def minors(releases: dict[str, str]) -> list[str]:
    """The minor releases of a list, such as ``"5.23"`` of ``"5.23.0"``, in its order."""
    return [release.rpartition(".")[0] for release in releases]
