from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from postgresql import Postgres
from recorded_service import Service
from small import Small
from sqlalchemy import create_engine, text

from compat_matrix.store import Store, database

settings.register_profile(
    "matrix", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # other tests run in parallel
settings.load_profile("matrix")


def pytest_collection_finish() -> None:
    """Collect garbage less often and skip the imported modules: collecting took a fifth of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000)


@pytest.fixture
def small(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    small = Small.make(tmp_path / "small", tmp_path_factory.getbasetemp() / "uv")
    yield small
    small.kill(small.processes())  # kill what a failed test leaves running


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
