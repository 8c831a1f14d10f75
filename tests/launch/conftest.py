"""Runs of stand-in services as a fixture."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.stubs import StubRun


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., StubRun]]:
    """Starts runs in one directory; none outlives its test."""
    runs: list[StubRun] = []

    def starting(**given: Any) -> StubRun:  # Any: StubRun's own keywords
        runs.append(StubRun(tmp_path, **given))
        return runs[-1]

    yield starting
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait(10)
