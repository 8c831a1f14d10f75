"""Every number of many records through the service, against what exact arithmetic makes of the same records."""

import json
import math
import random
import urllib.parse
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any  # Any: JSON

import numpy as np
import pytest

from tests.metrics.asking import get
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.sinks.event_files import by_rule

AXES = ("train/step", "rollout/step")
PRODUCERS = ("r/trainer-0", "r/trainer-1", "r/rollout")
EDGES = [-1.0, 0.0, 0.5, 2.0]
KINDS = ("mean", "sum", "min", "max")
BIG = 2**53 + 1
Said = dict[str, list[list[Any]]]
"""Key -> what all producers said of it."""
Steps = dict[tuple[str, int, int], Said]
"""(axis, step, attempt)."""


class Run:
    """Makes records of three producers, two attempts and late parts, sends them, and keeps what was said."""

    def __init__(self, service: MetricsProcess, seed: int) -> None:
        self.service, self.random = service, random.Random(seed)
        self.said: Steps = defaultdict(lambda: defaultdict(list))
        self._sequences = dict.fromkeys(PRODUCERS, 1)

    def number(self) -> float | int:
        return self.random.choice(
            [self.random.gauss(0, 1) * 10 ** self.random.randint(-9, 9), self.random.randint(-9, 9)]
        )

    def values(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kind in KINDS:
            count = [self.random.choice([0, 1, 7, 1000])] if kind == "mean" else []
            found[f"{kind}/x"] = [kind, self.number(), *count]
            odd = self.random.choice(["NaN", "Infinity", 1.5]) if step % 5 == 0 else self.number()
            found[f"{kind}/odd"] = [kind, odd, *([1] if kind == "mean" else [])]
        found["sum/big"] = ["sum", BIG]
        found["spread"] = ["histogram", EDGES, [self.random.randint(0, 9) for _ in EDGES[1:]]]
        return found

    def send(self, producer: str, steps: range, attempt: int) -> None:
        records = []
        for axis in AXES:
            for step in steps:
                values = self.values(step)
                for key, value in values.items():
                    self.said[axis, step, attempt][key].append(value)
                more: dict[str, Any] = {"part": producer, "parts": list(PRODUCERS)}
                records.append(part(step, values, axis=axis, attempt=attempt, **more))
        send(self.service, batch(records, first=self._sequences[producer], producer=producer))
        self._sequences[producer] += len(records)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    service = MetricsProcess(
        tmp_path_factory.mktemp("numbers"), use_tensorboard=True, metrics_row_timeout_s=0.5
    ).start()
    made = Run(service, seed=5)
    for producer in PRODUCERS[:2]:
        made.send(producer, range(40), attempt=1)
    until(lambda: len(service.rows()) == 80, "the incomplete rows")
    made.send(PRODUCERS[2], range(40), attempt=1)  # amends them
    for producer in PRODUCERS:
        made.send(producer, range(25, 50), attempt=2)  # goes back behind the last step
    service.flush()
    yield made
    service.end()


def exact(said: list[list[Any]]) -> float | int | None:
    """By the rules of the metrics, without rounding on the way."""
    kind, numbers = said[0][0], [float(value[1]) if isinstance(value[1], str) else value[1] for value in said]
    if kind == "mean":
        count = sum(value[2] for value in said)
        if not all(map(math.isfinite, numbers)):
            return sum(numbers) / count
        return float(sum(map(Fraction, numbers)) / count) if count else None
    if kind == "sum":
        return sum(numbers) if not all(map(math.isfinite, numbers)) else _plain(sum(map(Fraction, numbers)))
    if any(map(math.isnan, numbers)):
        return math.nan
    return min(numbers) if kind == "min" else max(numbers)


def _plain(number: Fraction | int) -> float | int:
    return int(number) if Fraction(number).denominator == 1 else float(number)


def expected(said: Said) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for key, values in said.items():
        if key != "spread" and (number := exact(values)) is not None:
            found[key] = number
            if nonfinite := sum(isinstance(value[1], str) for value in values):
                found[f"{key}/nonfinite"] = nonfinite
    return found


def differences(found: dict[str, Any], wanted: dict[str, float | int]) -> list[str]:
    """Sums of floats may round; nothing else may."""
    numbers = {key: float(value) if isinstance(value, str) else value for key, value in found.items()}
    if numbers.keys() != wanted.keys():
        return sorted(numbers.keys() ^ wanted.keys())
    exact_keys = [key for key in wanted if key.startswith(("min", "max", "sum/big")) or key.endswith("nonfinite")]
    wrong = [
        key for key in exact_keys if not (numbers[key] == wanted[key] or (numbers[key] != numbers[key] != wanted[key]))
    ]
    scale = {
        key: 1e-9 if key.endswith("odd") else 1e-6 for key in wanted
    }  # what cancels out leaves the rest's rounding
    return wrong + [
        key
        for key in wanted.keys() - set(exact_keys)
        if not np.isclose(numbers[key], wanted[key], rtol=1e-12, atol=scale[key], equal_nan=True)
    ]


def last_rows(service: MetricsProcess) -> dict[tuple[str, int, int], dict[str, Any]]:
    return {(row["axis"], row["step"], row["attempt"]): row for row in service.rows()}


def current(said: Steps) -> dict[tuple[str, int, int], Said]:
    return {place: keys for place, keys in said.items() if place[2] == 2 or place[1] < 25}


def test_rows_say_what_exact_arithmetic_says(run: Run) -> None:
    rows = last_rows(run.service)
    assert rows.keys() == run.said.keys() and all(row["complete"] for row in rows.values())
    wrong = {place: differences(rows[place]["values"], expected(said)) for place, said in run.said.items()}
    assert {place: keys for place, keys in wrong.items() if keys} == {}


def test_histograms_have_the_counts_of_all_parts(run: Run) -> None:
    rows = last_rows(run.service)
    for place, said in run.said.items():
        counts = np.sum([value[2] for value in said["spread"]], axis=0).tolist()
        assert rows[place]["histograms"]["spread"] == {"edges": EDGES, "counts": counts}


@pytest.mark.parametrize("axis", AXES)
def test_curves_say_the_same(run: Run, axis: str) -> None:
    keys = sorted({key for said in run.said.values() for key in expected(said)})
    wanted: dict[str, dict[int, float]] = defaultdict(dict)
    for (of_axis, step, attempt), row in last_rows(run.service).items():
        if of_axis == axis and (attempt == 2 or step < 25):
            for key, value in row["values"].items():
                wanted[key][step] = float(value)
    query = urllib.parse.urlencode({"run": "r", "key": keys}, doseq=True)
    for curve in get(run.service.http, f"/api/points?{query}")["curves"]:
        if curve["axis"] == axis:
            found = dict(zip(curve["steps"], map(float, curve["values"]), strict=True))
            assert json.dumps(sorted(found.items())) == json.dumps(sorted(wanted.pop(curve["key"]).items()))
            assert curve["attempts"] == [1 + (step >= 25) for step in curve["steps"]]
    assert wanted == {}


def test_tensorboard_shows_them_in_its_32_bits(run: Run) -> None:
    run.service.stop()
    curves = by_rule(Path(run.service.run_dir.root) / "tensorboard" / "r")
    rows = last_rows(run.service)
    wanted: dict[str, dict[int, float]] = defaultdict(dict)
    for place in current(run.said):
        for key, value in rows[place]["values"].items():
            wanted[f"{place[0].split('/')[0]}/{key}"][place[1]] = float(np.float32(float(value)))
    assert curves.keys() == wanted.keys()
    for tag, points in curves.items():
        assert json.dumps(points) == json.dumps(sorted(wanted[tag].items())), tag
