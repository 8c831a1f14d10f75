"""Training and other sinks do not notice a wandb that is away: their times side by side."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from furlong.records import Last
from tests.metrics.running import MetricsProcess, until
from tests.metrics.wandb_api import WandbApi, wait_steps

Make = Callable[..., MetricsProcess]
NUM_STEPS = 150
STEP_S = 0.02
VALUES = {f"train/value_{number}": Last(0.5) for number in range(30)}


@dataclass(frozen=True)
class Times:
    """Of one run of NUM_STEPS steps."""

    call_us: float
    """Median of a step's call."""
    worst_call_us: float
    row_s: float
    """Median from the call to the row's line in metrics.jsonl."""
    worst_row_s: float
    steps_s: float
    """All steps."""


def train(service: MetricsProcess, path: Path) -> Times:
    """Steps of a known length, as a trainer does them."""
    telemetry = service.telemetry()
    calls, at = [], {}
    begun = time.perf_counter()
    for step in range(1, NUM_STEPS + 1):
        time.sleep(STEP_S)
        before = time.perf_counter()
        telemetry.metrics("train/step", step, VALUES, part="trainer", parts=["trainer"])
        at[step] = time.perf_counter()
        calls.append(at[step] - before)
        while path.exists() and path.read_bytes().count(b"\n") < step and time.perf_counter() - at[step] < 5:
            time.sleep(0.001)
        at[step] = time.perf_counter() - at[step]
    took = time.perf_counter() - begun
    telemetry.close(5.0)
    rows = sorted(list(at.values())[5:])
    return Times(statistics.median(calls) * 1e6, max(calls) * 1e6, statistics.median(rows), rows[-1], took)


def start(make: Make, api: WandbApi, state: str) -> MetricsProcess:
    """A service whose wandb is ok, down, hanging at init, or dead in mid-run; `none`: without one."""
    if state == "down":
        api.down()
    if state == "hang":
        api.hangs = lambda what: True
    options = {} if state == "none" else {"use_wandb": True, "wandb_mode": "online", "wandb_init_timeout_s": 2.0}
    service = make(environment={**api.environment, "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1"}, **options).start()
    if state == "ok":
        until(lambda: any(s.name == "wandb" and s.state == "healthy" for s in service.status().sinks), "wandb healthy")
    return service


@pytest.mark.slow
@pytest.mark.parametrize("state", ["down", "hang"])
def test_wandb_that_is_away_is_noticed_by_nobody(
    tmp_path_factory: pytest.TempPathFactory, state: str, record_property: Callable[[str, object], None]
) -> None:
    with WandbApi() as api:
        measured: dict[str, Times] = {}
        for name in ("none", state):
            service = start(lambda **options: _made(tmp_path_factory, **options), api, name)
            try:
                measured[name] = train(service, service.run_dir.metrics_rows)
                if name == state:
                    api.down()
                    api.hangs = lambda what: False
                    api.up()
                    wait_steps(api, list(range(1, NUM_STEPS + 1)), limit_s=60)
            finally:
                service.end()
    for name, times in measured.items():
        print(f"wandb {name}: {times}")
        record_property(name, repr(times))
    without, away = measured["none"], measured[state]
    assert away.call_us < without.call_us * 2 + 50
    assert away.row_s < without.row_s * 2 + 0.05
    assert away.worst_row_s < 2.0


def _made(factory: pytest.TempPathFactory, **options: object) -> MetricsProcess:
    return MetricsProcess(factory.mktemp("side-by-side"), **options)  # type: ignore[arg-type]
