"""Synthetic runs: rows with healthy noise, and one fault in them."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping

from furlong.alertrules import BUILT_IN, Rule
from services.metrics.alerts.alert import Alert
from services.metrics.alerts.rowwatch import RowFacts
from services.metrics.alerts.runwatch import RunWatch

Noise = Callable[[random.Random], float]
SHAPES: Mapping[str, Noise] = {
    "normal": lambda rng: rng.gauss(0, 1),
    "uniform": lambda rng: rng.uniform(-1.7, 1.7),
    "heavy": lambda rng: rng.gauss(0, 1) / math.sqrt(max(1e-3, rng.gammavariate(2, 0.5))),  # Student's t of 4
    "skewed": lambda rng: rng.expovariate(1) - 1,
    "bursts": lambda rng: rng.gauss(0, 3 if rng.random() < 0.05 else 1),
}
"""Noise of about unit size."""


def healthy(step: int, rng: random.Random, noise: Noise) -> dict[str, dict[str, float]]:
    """The rows of one rollout of a run that is well, by axis: everything drifts and is noisy, as real runs are."""
    near = lambda middle, size: max(0.0, middle + size * noise(rng))  # noqa: E731
    share = lambda middle, size: min(1.0, near(middle, size))  # noqa: E731
    progress = 1 - math.exp(-step / 300)
    train = {
        "train/loss": 0.3 * math.exp(-step / 400) + 0.02 * noise(rng),
        "train/grad_norm": near(0.6, 0.2),
        "train/grad_clipped": float(rng.random() < 0.15),
        "train/skipped_steps": 0.0,
        "train/kl_loss": near(0.0005 * step, 0.02 + 0.0001 * step),
        "train/entropy_loss": near(0.05 + 0.9 * math.exp(-step / 150), 0.01),
        "train/pg_clipfrac": share(0.08, 0.03),
        "train/train_rollout_logprob_abs_diff": near(0.012, 0.003),
        "train/lr-pg_0": min(step, 50) * 1e-6,
    }
    rollout = {
        "rollout/raw_reward": share(0.05 + 0.93 * progress, 0.02),
        "rollout/reward/std": near(0.45 - 0.25 * progress, 0.02),
        "rollout/zero_std/all_zero_percentage": share(0.3 * (1 - progress), 0.02),
        "rollout/zero_std/all_one_percentage": min(0.9, share(0.8 * progress, 0.03)),
        "rollout/truncated_ratio": share(0.05, 0.03),
        "rollout/repetition_frac": share(0.01, 0.005),
        "rollout/staleness/mean": near(0.5, 0.2),
        "rollout/num_aborted": float(rng.random() < 0.1) * 8,
        "rollout/num_failed": float(rng.random() < 0.1) * 8,
        "rollout/num_samples": 512.0,
        "perf/rollout_time": near(20, 4) + 6,
        "perf/train_time": near(18, 3) + 6,
        "perf/tokens_per_gpu_per_sec": near(3000, 250) + 500,
    }
    rows = {"train/step": train, "rollout/step": rollout}
    if step % 20 == 0:
        rows["eval/step"] = {"eval/held_out": share(0.05 + 0.9 * progress, 0.03)}
    return rows


Change = Callable[[int, dict[str, float]], None]
"""Changes the values of one row: what is wrong from some step on. Gets the number of rows since the fault began."""


def rows_of(
    num_steps: int,
    *,
    seed: int = 0,
    shape: str = "normal",
    fault_at: int | None = None,
    change: Change = lambda since, values: None,
    attempt: int = 1,
    start: int = 0,
    run: str = "r",
) -> Iterator[RowFacts]:
    """A run's rows; from step fault_at on with a fault."""
    rng = random.Random(seed)
    for step in range(start, start + num_steps):
        for axis, values in healthy(step, rng, SHAPES[shape]).items():
            if fault_at is not None and step >= fault_at:
                change(step - fault_at, values)
            yield RowFacts(run, axis, step, attempt, values, 1_000_000 * step)


def alerts_of(rows: Iterator[RowFacts], rules: Mapping[str, Rule] = BUILT_IN) -> list[Alert]:
    """What all rules say to the rows."""
    watch = RunWatch(rules.values(), halt_on=frozenset())
    return list(itertools.chain.from_iterable(watch.take(row) for row in rows))
