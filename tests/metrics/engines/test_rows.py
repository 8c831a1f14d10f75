"""What engines say of one interval is one record, reduced once, at its own time, and bounded."""

import math

import orjson
from structlog.testing import capture_logs

from furlong.records import Last, Mean, Sum
from services.metrics.engines.rows import MAX_INSTANCES, MAX_INTERVALS, MAX_SERIES, MAX_VALUES, EngineRows

NOW_S = 1_000_000.0


def rows() -> EngineRows:
    return EngineRows(run="r", interval_s=10.0)


def records(bodies: list[bytes]) -> list[tuple[int, dict[str, object]]]:
    return [(record["step"], record["values"]) for record in map(orjson.loads, bodies)]


def test_interval_is_one_record_at_its_end() -> None:
    made = rows()
    made.add("engine-0", NOW_S, {"a": Mean(1.0, 1), "n": Sum(2)}, now_s=NOW_S)
    made.add("engine-0", NOW_S + 9.9, {"a": Mean(3.0, 1), "n": Sum(5)}, now_s=NOW_S + 9.9)
    made.add("engine-1", NOW_S + 10.0, {"a": Mean(7.0, 1)}, now_s=NOW_S + 10.0)
    assert made.due(NOW_S + 10.1) == []
    assert records(made.due(NOW_S + 11.0)) == [
        (1_000_010, {"engine/engine-0/a": ["mean", 4.0, 2], "engine/engine-0/n": ["sum", 7]})
    ]
    assert records(made.due(NOW_S + 21.0)) == [(1_000_020, {"engine/engine-1/a": ["mean", 7.0, 1]})]
    assert made.due(NOW_S + 31.0) == []


def test_record_names_its_axis_and_part() -> None:
    made = rows()
    made.add("e", NOW_S, {"a": Mean(1.0, 1)}, now_s=NOW_S)
    (body,) = made.due(NOW_S + 11.0)
    record = orjson.loads(body)
    assert (record["axis"], record["part"], record["parts"], record["run"]) == (
        "engine/time",
        "engines",
        ["engines"],
        "r",
    )


def test_backlog_makes_the_rows_of_its_own_time() -> None:
    made = rows()
    for number in range(5):
        made.add("e", NOW_S - 1000 + number * 10, {"a": Mean(number, 1)}, now_s=NOW_S)
    assert [step for step, _ in records(made.due(NOW_S))] == [999_010 + number * 10 for number in range(5)]


def test_clock_that_is_ahead_does_not_hide_its_numbers() -> None:
    made = rows()
    made.add("e", NOW_S + 3600, {"a": Mean(1.0, 1)}, now_s=NOW_S)
    assert [step for step, _ in records(made.due(NOW_S + 11.0))] == [1_000_010]


def test_series_are_bounded_counted_and_said_once() -> None:
    made = rows()
    with capture_logs() as logs:
        for number in range(MAX_SERIES + 5):
            made.add("e", NOW_S, {f"k{number}": Mean(1.0, 1)}, now_s=NOW_S)
    (record,) = records(made.due(NOW_S + 11.0))
    assert (len(record[1]), made.num_left_out) == (MAX_SERIES, 5)
    assert [entry["event"] for entry in logs] == ["engine_series_limit"]


def test_fleet_of_engines_is_kept_whole() -> None:
    made, page = rows(), {f"k{number}": Mean(1.0, 1) for number in range(150)}
    for engine in range(40):
        made.add(f"10.0.0.{engine}:30000", NOW_S, page, now_s=NOW_S)
    (record,) = records(made.due(NOW_S + 11.0))
    assert (len(record[1]), made.num_left_out) == (40 * 150, 0)


def test_engines_that_come_and_go_use_nothing_up() -> None:
    made = rows()
    for start in range(3 * MAX_INSTANCES):
        now_s = NOW_S + start * 10
        made.add(f"SGLangEngine-{start}", now_s, {"a": Mean(1.0, 1), "b": Mean(1.0, 1)}, now_s=now_s)
        assert len(made.due(now_s + 11.0)) == 1
    assert (made.num_left_out, len(made._series)) == (0, MAX_INSTANCES)


def test_record_is_bounded() -> None:
    made, page = rows(), {f"k{number}": Mean(1.0, 1) for number in range(MAX_SERIES)}
    for engine in range(MAX_VALUES // MAX_SERIES + 2):
        made.add(f"engine-{engine}", NOW_S, page, now_s=NOW_S)
    (record,) = records(made.due(NOW_S + 11.0))
    assert (len(record[1]), made.num_left_out) == (MAX_VALUES, 2 * MAX_SERIES)


def test_interval_of_which_all_was_left_out_is_over_too() -> None:
    made = rows()
    made.add("e", NOW_S, {f"k{number}": Mean(1.0, 1) for number in range(MAX_SERIES)}, now_s=NOW_S)
    made.add("e", NOW_S + 10.0, {"one_more": Mean(1.0, 1)}, now_s=NOW_S + 10.0)
    assert (len(made.due(NOW_S + 31.0)), made.dump()) == (1, b"{}")


def test_intervals_that_are_open_are_bounded() -> None:
    made = rows()
    num_out = 0
    for number in range(2 * MAX_INTERVALS):
        made.add("e", NOW_S + number * 10, {"a": Mean(1.0, 1)}, now_s=NOW_S + number * 10)
        num_out += len(made.due(0.0))
    assert num_out == MAX_INTERVALS


def test_same_name_of_two_kinds_keeps_the_first_and_counts() -> None:
    made = rows()
    made.add("e", NOW_S, {"a": Mean(1.0, 1)}, now_s=NOW_S)
    made.add("e", NOW_S, {"a": Last(2.0)}, now_s=NOW_S)
    assert records(made.due(NOW_S + 11.0))[0][1] == {"engine/e/a": ["mean", 1.0, 1]}
    assert made.num_left_out == 1


def test_what_waits_is_the_same_after_dump_and_load() -> None:
    made, again = rows(), rows()
    made.add("e", NOW_S, {"a": Mean(math.nan, 1), "n": Sum(3)}, now_s=NOW_S)
    again.load(made.dump())
    assert again.due(NOW_S + 11.0) == made.due(NOW_S + 11.0)


def test_dump_has_what_lines_said_only() -> None:
    made = rows()
    made.add("e", NOW_S, {"scraped": Mean(1.0, 1), "both": Sum(1)}, now_s=NOW_S, from_line=False)
    assert not made.has_lines
    made.add("e", NOW_S, {"line": Mean(1.0, 1), "both": Sum(2)}, now_s=NOW_S)
    again = rows()
    again.load(made.dump())
    assert records(again.due(NOW_S + 11.0))[0][1] == {"engine/e/both": ["sum", 3], "engine/e/line": ["mean", 1.0, 1]}
    assert len(records(made.due(NOW_S + 11.0))[0][1]) == 3 and not made.has_lines


def test_damaged_dump_is_forgotten() -> None:
    made = rows()
    for body in (b"no json", b"[]", b'{"x": {"a": 1}}', b'{"1": 3}'):
        made.load(body)
        assert (made.due(NOW_S, everything=True), made.has_lines) == ([], False)
