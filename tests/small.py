"""A small project with its own matrix, whose cells take a fraction of a second: its transformers and torch are stubs."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import distributions
from io import StringIO
from pathlib import Path

import psutil
from forked import Forked

from compat_matrix.axes import Axes, load
from compat_matrix.cli import main
from compat_matrix.results import CellResult
from compat_matrix.store import Store

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = f"py{PYTHON.replace('.', '')}"

#: The packages of this environment that cells see: pytest, and little else, so that they start fast.
SEEN = (
    *("pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest-reportlog", "pytest-xdist", "execnet"),
    *("exceptiongroup", "tomli", "typing-extensions"),  # pytest needs these before Python 3.11
)

#: A build backend that needs nothing from an index.
BACKEND = """
import os
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("small.pth", os.path.abspath(".site") + "\\n")
        wheel.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\n")
        wheel.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.0.dist-info/RECORD", "")
    return name

def get_requires_for_build_editable(config_settings=None):
    return []
"""


@dataclass
class Small:
    """The project in `folder`; `axes`, `run` and `store` are those of a user.

    Attributes:
        uv_cache: a folder that projects share, where uv caches its queries of a Python.
    """

    folder: Path
    uv_cache: Path | None = None

    @classmethod
    def make(cls, folder: Path, uv_cache: Path | None = None) -> Small:
        small = cls(folder, uv_cache)
        small.write(
            "pyproject.toml",
            """
            [build-system]
            requires = []
            build-backend = "backend"
            backend-path = ["."]
            [project]
            name = "small"
            version = "1.0"
            """,
        )
        small.write("backend.py", BACKEND)
        small.write("wheels/README", "")
        (folder / ".site").mkdir()
        for one in distributions():
            if (one.metadata["Name"] or "").lower().replace("_", "-") in SEEN:
                for name in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
                    (folder / ".site" / name).symlink_to(str(one.locate_file(name)))
        return small

    def commit(self) -> None:
        """Commit the tests."""
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        for words in (("init", "-q"), ("add", "test_it.py"), (*author, "commit", "-qm", "tests")):
            subprocess.run(["git", *words], cwd=self.folder, check=True)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        path.write_text("".join(f"{line[margin:]}\n" for line in lines), encoding="utf-8")
        return path

    def axes(
        self,
        transformers: Sequence[str] = ("5.0", "5.1"),
        torch: Sequence[str] = ("2.11",),
        command: Sequence[str] = ("pytest", "test_it.py"),
        *,
        minutes: float = 1,
        more: str = "",
        axes: str = "",
    ) -> Axes:
        """Write the axes file, and empty pins for each of its parts without any."""
        self.write(
            "matrix/axes.toml",
            f"""
version = 1
[axes]
python = ["{PYTHON}"]
transformers = {[*transformers]}
torch = {[*torch]}
{axes}
[project]
path = ".."
[[tests]]
command = {[*command]}
minutes = {minutes}
{more}
""",
        )
        found = load(self.folder / "matrix" / "axes.toml")
        for cell in found.cells:
            for part in (cell.base, cell.layer):
                path = self.folder / "matrix" / "pins" / f"{part}.txt"
                path.parent.mkdir(exist_ok=True)
                path.touch()
        return found

    def wheel(
        self, name: str, version: str, files: dict[str, str], part: str | None = None, requires: Sequence[str] = ()
    ) -> None:
        """Build a wheel in `wheels`, and write the pin of a part."""
        (self.folder / "wheels").mkdir(exist_ok=True)
        path = self.folder / "wheels" / f"{name}-{version}-py3-none-any.whl"
        info = f"{name}-{version}.dist-info"
        files = {
            **files,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            + "".join(f"Requires-Dist: {one}\n" for one in requires),
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: small\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = [f"{file},sha256={_digest(text)},{len(text.encode())}" for file, text in files.items()]
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
            archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if part is not None:
            self.write(f"matrix/pins/{part}.txt", f"{name}=={version} --hash=sha256:{digest}")

    def environment(self, **more: str) -> dict[str, str]:
        # pytest's output is longer if it detects CI.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTEST_") and name not in ("CI", "BUILD_NUMBER")
        }
        return {
            **inherited,
            "KERNEL_COMPAT_MATRIX_CACHE": str(self.folder / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
            # Cells see only the wheels and the pytest plugins that they need.
            "UV_FIND_LINKS": str(self.folder / "wheels"),
            "UV_OFFLINE": "1",
            "UV_CACHE_DIR": str(self.uv_cache or self.folder / "cache" / "uv"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "pytest_reportlog.plugin",
            **more,
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "compat_matrix", *arguments]

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        # Tests in the background of a shell ignore Ctrl-C, and child processes would inherit that.
        return subprocess.Popen(
            ["env", "--default-signal=INT", *self.command(*arguments)],
            cwd=self.folder,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def fork(self, *arguments: str, **more: str) -> Forked:
        """Like `start`, but forked from a process that has imported the command."""
        return self.python("-m", "compat_matrix", *arguments, **more)

    def python(self, *arguments: str, **more: str) -> Forked:
        output = self.folder / f"output-{len([*self.folder.glob('output-*')])}"
        return Forked(*arguments, folder=self.folder, environment=self.environment(**more), output=output)

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the command in the project's folder, in this process: starting another one takes longer than a cell."""
        return self.run_in(self.folder, *arguments, **more)

    def run_in(self, folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the command in a folder."""
        output, errors = StringIO(), StringIO()
        old, before = {**os.environ}, Path.cwd()
        os.environ.clear()
        os.environ.update(self.environment(**more))
        os.chdir(folder)
        try:
            with redirect_stdout(output), redirect_stderr(errors):
                code = main(arguments)
        except SystemExit as ended:  # argparse
            code = ended.code if isinstance(ended.code, int) else 1
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(old)
        return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())

    @property
    def store(self) -> Store:
        return Store.open(str(self.folder / "matrix.sqlite"), create=False)

    def results(self, run: str = "latest") -> dict[str, CellResult]:
        """The results of a run by cell."""
        with self.store as store:
            name = store.resolve(run)
            found = [cell for cell, one in store.summary(name).items() if one.verdict]
            return {cell.name: store.result(name, cell) for cell in found}

    def processes(self) -> list[psutil.Process]:
        """The processes whose working directory or arguments are in the project: those of its cells and its runner."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                named = Path(process.cwd()).is_relative_to(self.folder) or any(
                    str(self.folder) in argument for argument in process.cmdline()
                )
            except (psutil.Error, OSError):
                continue
            if named:
                found.append(process)
        return found

    def kill(self, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
