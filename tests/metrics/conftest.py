"""The metrics service as a fixture."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.metrics.running import MetricsProcess
from tests.metrics.said import Said


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., MetricsProcess]]:
    """Makes services that are ended with the test; not started."""
    made: list[MetricsProcess] = []

    def make_one(**options: object) -> MetricsProcess:
        made.append(MetricsProcess(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for service in made:
        service.end()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsProcess]:
    """A service that serves, shared by a module's tests: each has its own producer and steps."""
    shared = MetricsProcess(tmp_path_factory.mktemp("metrics")).start()
    yield shared
    shared.end()


@pytest.fixture
def producer(request: pytest.FixtureRequest) -> str:
    """A producer's name that no other test has."""
    return f"r/{abs(hash(request.node.nodeid))}"


@pytest.fixture
def step(request: pytest.FixtureRequest) -> int:
    """A step that no other test has."""
    return abs(hash(request.node.nodeid)) % 2**40


@pytest.fixture
def said() -> Iterator[Said]:
    """The log lines of this process, of every thread, wherever else they would go."""
    with capture_logs() as lines:
        yield lines
