from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from postgresql import Postgres
from recorded_service import Service
from small import Small
from sqlalchemy import create_engine, text
from waiting import LONG

from compat_matrix.axes import Axes, load
from compat_matrix.store import Store, database

settings.register_profile(
    "matrix", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # other tests run in parallel
settings.load_profile("matrix")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test may wait several times, each time as long as only a hang takes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3 * LONG))


@pytest.fixture
def small(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    small = Small.make(tmp_path / "small", tmp_path_factory.getbasetemp() / "uv")
    yield small
    small.kill(small.processes())  # kill what a failed test leaves running


#: The build backend of a member, whose distribution and module have the name of its folder.
MEMBER = """
    import os
    import zipfile

    NAME = os.path.basename(os.getcwd())
    INFO = f"{NAME}-1.0.dist-info"

    def built(folder, name, text):
        with zipfile.ZipFile(f"{folder}/{NAME}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(name, text)
            wheel.write("entry_points.txt", f"{INFO}/entry_points.txt")
            wheel.writestr(f"{INFO}/METADATA", f"Metadata-Version: 2.1\\nName: {NAME}\\nVersion: 1.0\\n")
            wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
            wheel.writestr(f"{INFO}/RECORD", "")
        return f"{NAME}-1.0-py3-none-any.whl"

    def build_wheel(folder, config_settings=None, metadata_directory=None):
        with open(f"{NAME}.py") as module:
            return built(folder, f"{NAME}.py", module.read())

    def build_editable(folder, config_settings=None, metadata_directory=None):
        return built(folder, f"{NAME}.pth", os.getcwd())
"""


@pytest.fixture
def members(small: Small) -> Callable[..., Axes]:
    """Makes these folders the only members in the project's axes file, each with an entry point in the group `small`."""

    def make(*folders: str) -> Axes:
        for folder in folders:
            name = folder.rpartition("/")[2]
            text = (small.folder / "pyproject.toml").read_text().replace('name = "small"', f'name = "{name}"')
            if not (small.folder / folder).exists():
                small.write(f"{folder}/pyproject.toml", f'{text}dependencies = ["small==1.0"]')
                small.write(f"{folder}/backend.py", MEMBER)
                small.write(f"{folder}/{name}.py", f"NAME = {name!r}")
                small.write(f"{folder}/entry_points.txt", f"[small]\n{name} = {name}:NAME")
        path = small.folder / "matrix" / "axes.toml"
        text = re.sub(r'path = "\.\."\n(members = .*\n)?', f'path = ".."\nmembers = {[*folders]}\n', path.read_text())
        path.write_text(text)
        return load(path)

    return make


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    with ExitStack() as stack:
        try:
            server = stack.enter_context(Postgres.running())
        except FileNotFoundError as error:
            pytest.skip(str(error))
        yield server


@pytest.fixture(scope="session")
def postgres(postgres_server: Postgres) -> str:
    """The URL of a server."""
    return postgres_server.url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    server: str = request.getfixturevalue("postgres")
    engine = create_engine(database.parse(server))
    with engine.begin() as connection:  # a new database would create a thousand files
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return server


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@pytest.fixture
def service() -> Iterator[Service]:
    """A stand-in for the matrix service, with recorded answers."""
    service = Service()
    yield service
    service.stop()
