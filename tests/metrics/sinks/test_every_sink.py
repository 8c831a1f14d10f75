"""All sinks at once, read back through the programs' own interfaces."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.sinks.everything import (
    Curves,
    differences,
    everything,
    jsonl_curves,
    statsd_name,
    tensorboard_curves,
    wandb_curves,
)

Make = Callable[..., MetricsProcess]


def losses(first: int, last: int, attempt: int) -> list[bytes]:
    values = {
        n: {"train/loss": ["last", -1000 * attempt - n], "train/a@1": ["last", n]} for n in range(first, last + 1)
    }
    return [part(n, dict(named), attempt=attempt) for n, named in values.items()]


@pytest.mark.tools
@pytest.mark.slow
def test_resume_behind_the_last_step_is_one_curve_everywhere(make: Make, tmp_path: Path) -> None:
    steps = range(201)
    expected: Curves = {
        "train/loss": {n: -1000.0 - n if n < 100 else -2000.0 - n for n in steps},
        "train/a@1": {n: float(n) for n in steps},
    }
    with everything(tmp_path) as others:
        service = make(**others.options()).start()
        send(service, batch(losses(0, 150, 1)))
        service.flush()
        service.kill()
        service.start()
        send(service, batch(losses(100, 200, 2), first=152))
        service.flush()
        until(lambda: others.ask_prometheus('furlong_train_loss{run="r"} == -2200'), "Prometheus", limit_s=30)
        assert [found["value"][1] for found in others.ask_prometheus('furlong_row_attempt{axis="train/step"}')] == ["2"]
        until(lambda: others.statsd_newest().get(statsd_name("r", "train/loss")) == -2200, "statsd")
        assert service.stop() == 3
        assert differences(jsonl_curves(service.run_dir.metrics_rows), expected) == []
        assert differences(wandb_curves(service.run_dir.root), expected) == []
        assert differences(tensorboard_curves(service.run_dir.root / "tensorboard"), expected) == []
        assert differences(others.webhook_curves(), expected) == []
        assert differences(others.otlp_curves(), expected) == []
        assert differences(others.mlflow_curves(expected), expected) == []
