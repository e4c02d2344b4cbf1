from __future__ import annotations

from collections.abc import Callable

from small import Small

from compat_matrix.axes import Axes
from compat_matrix.fingerprint import of_axes


def test_everything_that_a_cell_is_made_of_changes_it(small: Small, members: Callable[..., Axes]) -> None:
    axes = small.axes()
    pins = next((small.folder / "matrix" / "pins").iterdir())
    found = [of_axes(axes)]
    small.write("src/mine.py", "value = 1")
    found.append(of_axes(axes))
    pins.write_text(f"torch==2.11.0 --hash=sha256:{'0' * 64}\n")
    found.append(of_axes(axes))
    pins.write_text(f"torch==2.11.0 --hash=sha256:{'1' * 64}\n")
    found.append(of_axes(axes))
    pins.rename(pins.with_name("py311-torch9.txt"))
    found.append(of_axes(axes))
    axes = members("one", "build")  # a folder that is left out elsewhere
    found.append(of_axes(axes))
    for name in ("one/pyproject.toml", "build/build.py"):
        small.write(name, f"{(small.folder / name).read_text()}# changed")
        found.append(of_axes(axes))
    assert len({*found}) == len(found)
    small.write("README", "no part of a cell")
    assert of_axes(axes) == found[-1]
