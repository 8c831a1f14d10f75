"""The pure parts of asking: levels, filters, thinning, places, nearest names."""

import math

import pytest

from furlong.asking.filters import LogFilter
from furlong.asking.following import Place
from furlong.asking.levels import level_number
from furlong.asking.store import closest
from furlong.asking.thin import thinned


@pytest.mark.parametrize(
    ("given", "number"),
    [("info", 20), ("WARN", 30), (" Error ", 40), ("fatal", 50), ("trace", 10), (30, 30), (35, 30), (60, 50), (0, 10),
     ("40", 40), (None, 20), ("loud", 20), (True, 20), (float("nan"), 20), ([], 20), ("", 20)],
)  # fmt: skip
def test_levels_of_any_spelling(given: object, number: int) -> None:
    assert level_number(given) == number


@pytest.mark.parametrize(
    ("wanted", "line", "fits"),
    [
        (LogFilter(), b'{"event":"x"}', True),
        (LogFilter(), b'{"event":"metrics"}', False),
        (LogFilter(), b'{"event": "metrics"}', False),
        (LogFilter(), b'{"x":{"event":"metrics"}}', True),
        (LogFilter(), b'{"event":"metrics","event":"x"}', True),
        (LogFilter(), b'{"x":"\\"event\\":\\"metrics\\""}', True),
        (LogFilter(), b"[1]", False),
        (LogFilter(), b"{broken", False),
        (LogFilter(service="a"), b'{"event":"a","service":"b"}', False),
        (LogFilter(service="a"), b'{"service": "a"}', True),
        (LogFilter(rollout_id=3), b'{"rollout_id":3}', True),
        (LogFilter(rollout_id=3), b'{"rollout_id":33}', False),
        (LogFilter(level=30), b'{"level":"info"}', False),
        (LogFilter(level=30), b'{"level":"WARNING"}', True),
        (LogFilter(level=20), b"{}", True),
        (LogFilter(text="ÉTÉ"), '{"m":"été"}'.encode(), True),
        (LogFilter(text="a\nb"), b'{"m":"A\\nB"}', True),
        (LogFilter(text='"M":"a'), b'{"m":"a"}', True),
        (LogFilter(text="\ud800"), b'{"m":"?"}', True),
        (LogFilter(text="zz"), b'{"m":"a"}', False),
    ],
)
def test_filters(wanted: LogFilter, line: bytes, fits: bool) -> None:
    assert (wanted.match(line) is not None) is fits


def test_thinning_keeps_ends_peaks_dips_and_gaps() -> None:
    values: list[float | None] = [math.sin(n / 100) for n in range(10_000)]
    values[5000], values[6000], values[7000], values[8000] = 9.0, -9.0, None, math.inf
    kept = thinned(values, 200)
    assert {0, 5000, 6000, 7000, 8000, 9999} <= set(kept) and len(kept) <= 200 and kept == sorted(kept)


@pytest.mark.parametrize("max_points", [5, 6, 7, 100])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 99, 1000])
@pytest.mark.parametrize("pattern", [[1.0], [None], [1.0, None, 5.0, 0.0, 2.0]])
def test_thinning_never_gives_more_than_asked(count: int, max_points: int, pattern: list[float | None]) -> None:
    kept = thinned((pattern * count)[:count], max_points)
    assert len(kept) <= max_points and (count > max_points or len(kept) == count)


def test_places_are_read_back() -> None:
    assert Place.parse(str(Place(1, 2, 3))) == Place(1, 2, 3)
    for text in ("", "1.2", "1.2.x", "-1.2.3", "1.2.3.4", "9" * 30 + ".1.1"):
        with pytest.raises(ValueError, match="RECORD"):
            Place.parse(text)


def test_nearest_names_hold_it_or_look_like_it() -> None:
    known = ["train/loss", "train/grad_norm", "rollout/raw_reward", "perf/step_time"]
    assert closest("loss", known)[0] == "train/loss"
    assert closest("train/los", known)[0] == "train/loss"
    assert closest("reward/raw_reward", known) == ["rollout/raw_reward"]
    assert closest("zzz", known) == []
