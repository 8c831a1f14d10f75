"""What stands in a log file becomes records: whole, once, and bounded, whatever it is."""

import datetime
import tracemalloc
from typing import Any

import orjson
import pytest

from services.metrics.reducer import read_part
from services.metrics.tailing.records import LineReader
from services.metrics.tailing.splitter import MAX_LINE_BYTES, Splitter

NOW = datetime.datetime(2026, 11, 29, 12, 0, 0, tzinfo=datetime.UTC)


def read(*chunks: bytes, path: str = "/logs/app.log", flush: bool = True) -> tuple[list[dict[str, Any]], LineReader]:
    """The records of a file that is read in these chunks."""
    splitter, reader = Splitter(), LineReader(path, "r")
    bodies: list[bytes] = []
    for chunk in chunks:
        bodies += reader.read(splitter.feed(chunk)[0], now=NOW, now_s=0.0)
    if flush:
        bodies += reader.read(splitter.flush()[0], now=NOW, now_s=0.0) + reader.close_all()
    return [orjson.loads(body) for body in bodies], reader


def texts(*chunks: bytes) -> list[str]:
    return [record["text"] for record in read(*chunks)[0]]


def test_lines_come_whole_however_the_reads_fall() -> None:
    content = "eins\r\nzwei ü\n\ndrei\n".encode()
    for cut in range(len(content)):
        assert texts(content[:cut], content[cut:]) == ["eins", "zwei ü", "drei"]


def test_line_of_text_says_where_it_stood() -> None:
    (record,), _ = read(b"hello\n", path="/logs/engine-3.out")
    assert record == {
        "ts": "2026-11-29T12:00:00.000000Z",
        "level": "info",
        "event": "line",
        "run": "r",
        "service": "engine",
        "instance": "engine-3",
        "file": "/logs/engine-3.out",
        "text": "hello",
    }


@pytest.mark.parametrize("name", ["app.log", "app.log.1", "app.log-20261129", "app.out", "app"])
def test_rotated_file_belongs_to_the_same_service(name: str) -> None:
    assert read(b"x\n", path=f"/logs/{name}")[0][0]["service"] == "app"


def test_json_line_is_a_record_as_it_is() -> None:
    records, _ = read(b'{"event":"a","n":1.50}\n  {"run": "other", "file": "f"}\n{}\n')
    assert records == [
        {"event": "a", "n": 1.5, "run": "r", "file": "/logs/app.log"},
        {"run": "other", "file": "f"},
        {"run": "r", "file": "/logs/app.log"},
    ]


def test_run_of_another_kind_is_replaced() -> None:
    assert read(b'{"run": 3}\n{"run": ""}\n')[0] == [{"run": "r", "file": "/logs/app.log"}] * 2


def test_metrics_record_of_a_file_is_one() -> None:
    line = b'{"event":"metrics","axis":"train/step","step":3,"values":{"train/loss":0.5}}\n'
    (record,), _ = read(line)
    part = read_part(record)
    assert (part.key.run, part.key.step, part.values["train/loss"].value) == ("r", 3, 0.5)  # type: ignore[union-attr]


def test_numbers_that_json_has_not_are_kept() -> None:
    (record,), _ = read(b'{"loss": NaN, "x": -Infinity, "s": "\\ud800"}\n')
    assert (record["loss"], record["x"], record["s"]) == ("NaN", "-Infinity", "?")


def test_objects_welded_on_one_line_are_told_apart_and_counted() -> None:
    records, reader = read(b'{"n":1}{"n":2} {"n":3}\n{"n":4}\n')
    assert [record["n"] for record in records] == [1, 2, 3, 4]
    assert reader.counts.welded == 1


def test_torn_object_does_not_hide_the_whole_one_behind_it() -> None:
    records, reader = read(b'{"step": 4, "lo{"step": 5, "loss": 1}\n{"step": 6, "l\n')
    assert [record.get("text", record.get("step")) for record in records] == ['{"step": 4, "lo', 5, '{"step": 6, "l']
    assert reader.counts.welded == 1


def test_line_of_braces_takes_no_time() -> None:
    (record,), _ = read(b"{" * 200_000 + b"\n")
    assert len(record["text"]) == 200_000


def test_bytes_that_are_no_utf8_are_replaced_and_counted() -> None:
    records, reader = read(b'a \xff b\n{"s": "\xff\xfe"}\n')
    assert [record.get("text", record.get("s")) for record in records] == ["a \ufffd b", "\ufffd\ufffd"]
    assert reader.counts.invalid == 2


def test_nul_bytes_are_left_out() -> None:
    records, reader = read(b"\0" * 200_000 + b"after\n", b"be\0fore\n")
    assert [record["text"] for record in records] == ["after", "before"]
    assert reader.counts.nuls >= 1


def test_only_the_last_state_of_a_bar_is_kept() -> None:
    content = b"shards:   0% | 0/2\rshards:  50% | 1/2\rshards: 100% | 2/2\r\n\r10%\r   \rnext\n"
    assert texts(content) == ["shards: 100% | 2/2", "next"]


def test_bar_without_an_end_is_bounded() -> None:
    splitter, state = Splitter(), b"\r" + b"#" * 200
    for number in range(20_000):
        splitter.feed(state + str(number).encode())
        assert len(splitter.buffer) < 100_000
    assert splitter.feed(b"\n")[0][0].content.endswith(b"19999")


def test_line_of_many_megabytes_is_cut_with_a_mark_and_bounded_memory() -> None:
    tracemalloc.start()
    splitter, reader, bodies = Splitter(), LineReader("/logs/app.log", "r"), []
    chunk = b"x" * 65536
    for _ in range(1024):
        bodies += reader.read(splitter.feed(chunk)[0], now=NOW, now_s=0.0)
    bodies += reader.read(splitter.feed(b"end\nnext\n")[0], now=NOW, now_s=0.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    long, after = map(orjson.loads, bodies)
    assert (len(long["text"]), long["clipped"], after["text"]) == (MAX_LINE_BYTES, True, "next")
    assert reader.counts.clipped == 1
    assert peak < 24 * MAX_LINE_BYTES


def test_line_of_control_characters_makes_a_record_that_is_taken() -> None:
    splitter, reader = Splitter(), LineReader("/logs/app.log", "r")
    (body,) = reader.read(splitter.feed(b"\x01" * 900_000 + b"\n")[0], now=NOW, now_s=0.0)
    assert len(body) < 4 * 1024 * 1024
    assert orjson.loads(body)["clipped"]


def test_half_line_and_its_rest_are_two_records_that_say_so() -> None:
    splitter, reader = Splitter(), LineReader("/logs/app.log", "r")
    splitter.feed(b"half")
    lines = splitter.flush()[0] + splitter.feed(b" rest\nwhole\n")[0]
    records = [orjson.loads(body) for body in reader.read(lines, now=NOW, now_s=0.0)]
    assert [(r["text"], r.get("partial"), r.get("continued")) for r in records] == [
        ("half", True, None),
        (" rest", None, True),
        ("whole", None, None),
    ]


def test_colours_are_taken_off() -> None:
    assert texts(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07plain\n") == ["red plain"]
