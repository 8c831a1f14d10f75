"""Runs for the tests of this folder: one that is run to its end once, and starters that leave nothing behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.real_runs import Up

SECRET = "SECRET123"
HOSTILE = {
    "WANDB_API_KEY": SECRET,
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "all_proxy": "http://127.0.0.1:9",
    "grpc_proxy": "http://127.0.0.1:9",
    "WANDB_MODE": "offline",
}
"""A key that must show nowhere, and proxies at a dead port that no internal call may take."""
Start = Callable[..., Up]


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """The small run, unbroken, with a secret and dead proxies in its environment; ended when the test gets it."""
    up = Up(tmp_path_factory.mktemp("whole"), "--use-wandb", environment=HOSTILE)
    try:
        up.wait_for("iter 2/4")
        up.end()
        yield up
    finally:
        up.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `furlong up` in one run directory; none outlives its test."""
    started: list[Up] = []

    def starting(*flags: str) -> Up:
        started.append(Up(tmp_path, *flags))
        return started[-1]

    yield starting
    for up in started:
        up.kill()
