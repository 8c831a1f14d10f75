"""`furlong status` and the last lines of `furlong up` of a run whose metrics service is shared with others."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from furlong.cli.status import as_table
from furlong.cli.summary import closing_lines
from furlong.config import to_toml
from furlong.config.sections import RunConfig
from furlong.launch.look import look_at
from furlong.launch.supervisor import Ending
from furlong.process import ExitCode
from furlong.rundir import RunDir
from tests.launch.runs import read, small_run
from tests.metrics.running import MetricsProcess, batch, part, send


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[MetricsProcess]:
    """A service that knows three rollouts and two evaluations of the run `small`."""
    service = MetricsProcess(tmp_path).start()
    bodies = [row(step, "rollout/step", {"rollout/raw_reward": ["last", 0.25 * step]}) for step in (0, 1, 2)]
    bodies += [
        row(step, "eval/step", {"eval/sums": ["last", 0.1 * step], "eval/sums-truncated_ratio": ["last", 9]})
        for step in (1, 2)
    ]
    send(service, batch(bodies))
    yield service
    service.end()


def row(step: int, axis: str, values: dict[str, object]) -> bytes:
    return part(step, values, axis=axis).replace(b'"run":"r"', b'"run":"small"')


def run_with(tmp_path: Path, address: str) -> tuple[RunConfig, RunDir]:
    """A run directory of a run that ships to an address."""
    (tmp_path / "own").mkdir()
    config = read(small_run(tmp_path / "own"), "--metrics-addr", address)
    run_dir = RunDir(tmp_path / "own" / "run").create()
    run_dir.config.write_text(to_toml(config))
    return config, run_dir


def closed(config: RunConfig, run_dir: RunDir) -> str:
    ending = Ending(ExitCode.DONE, "")
    return "\n".join(closing_lines(config, run_dir, ending, seconds=1.0, again="furlong up"))


def test_closing_lines_and_status_read_the_rows_from_it(tmp_path: Path, shared: MetricsProcess) -> None:
    config, run_dir = run_with(tmp_path, shared.address)
    lines = closed(config, run_dir)
    assert "done: 3 of 3 rollouts" in lines and "0.000 -> 0.500" in lines and "eval/sums   0.100 -> 0.200" in lines
    assert f"with the service at {shared.address}, as run small\n" in lines
    found = look_at(run_dir)
    assert found.last_row == {"step": 2, "rollout/raw_reward": 0.5}
    assert "last row: rollout 2, rollout/raw_reward 0.5" in as_table(found, width=None)


def test_service_that_knows_nothing_of_the_run_is_told(tmp_path: Path, shared: MetricsProcess) -> None:
    config, run_dir = run_with(tmp_path, shared.address)
    other = config.model_copy(update={"run": config.run.model_copy(update={"name": "nobody"})})
    assert "is not known now: there is no run 'nobody'" in closed(other, run_dir)


@pytest.mark.parametrize("listens", [True, False])
def test_service_that_does_not_answer_costs_a_moment_and_is_told(tmp_path: Path, listens: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        config, run_dir = run_with(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        assert "is not known now" in closed(config, run_dir)
        assert "does not answer" in (text := as_table(look_at(run_dir), width=None)) or "no answer within" in text
        assert time.monotonic() - began < 10
