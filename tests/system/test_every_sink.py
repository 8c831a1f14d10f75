"""The short run of tests, and the demo in its full length, with every sink on: each real program shows their values."""

import math
from pathlib import Path

import pytest

from furlong.process import ExitCode
from tests.metrics.sinks.everything import (
    Everything,
    differences,
    everything,
    jsonl_curves,
    same,
    statsd_name,
    tensorboard_curves,
    wandb_curves,
)
from tests.metrics.sinks.otlp_decoding import logs_in
from tests.system.real_runs import ROOT, Up

DEMO = ROOT / "examples" / "arithmetic" / "config.toml"


@pytest.mark.tools
@pytest.mark.slow
@pytest.mark.parametrize(("run", "config", "num_steps"), [("small", None, 8), ("arithmetic", DEMO, 60)])
def test_every_program_shows_the_values_of_the_run(
    tmp_path: Path, run: str, config: Path | None, num_steps: int
) -> None:
    with everything(tmp_path) as others:
        up = Up(tmp_path, *others.flags(), "--save-interval=4", config=config)
        try:
            assert up.end(limit_s=240.0) == ExitCode.DONE, up.told()
        finally:
            up.kill()
        expected = jsonl_curves(up.run_dir.metrics_rows)
        assert {"train/loss", "rollout/raw_reward", "perf/step_time", "eval/held_out"} <= expected.keys()
        assert len(expected["train/loss"]) == num_steps
        assert differences(wandb_curves(up.run_dir.root), expected) == []
        assert differences(tensorboard_curves(up.run_dir.root / "tensorboard"), expected, relative=1e-6) == []
        assert differences(others.webhook_curves(), expected) == []
        assert differences(others.otlp_curves(), expected) == []
        assert differences(others.mlflow_curves(expected), expected) == []
        (known,) = others.mlflow.runs("everything")
        assert (known["info"]["run_name"], known["info"]["status"]) == (run, "FINISHED")
        events = {record.body.string_value for _, record in logs_in(others.otlp.taken)}
        assert {"run_started", "run_ended"} <= events
        check_newest(others, expected, run)


def check_newest(others: Everything, expected: dict[str, dict[int, float]], run: str) -> None:
    """Those that have no steps: statsd has the newest of each, Prometheus what stood when it scraped."""
    gauges = others.statsd_newest()
    newest = {key: curve[max(curve)] for key, curve in expected.items()}
    finite = {key: value for key, value in newest.items() if math.isfinite(value)}
    wrong = {key: gauges.get(statsd_name(run, key)) for key, value in finite.items()}
    assert [key for key, value in wrong.items() if value is None or not same(value, finite[key])] == []
    shown = others.ask_prometheus(f'last_over_time({{run="{run}",key!=""}}[10m])')
    found = {one["metric"]["key"]: float(one["value"][1]) for one in shown}
    assert {"train/loss", "rollout/raw_reward"} <= found.keys()
    assert [
        key for key, value in found.items() if not any(same(value, known) for known in expected[key].values())
    ] == []
