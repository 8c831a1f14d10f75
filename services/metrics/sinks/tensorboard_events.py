"""TensorBoard's event files: how a row becomes an event, and how a file is read back. The only file that imports
tensorboardX, whose messages and checksums it uses; what is written when is decided in tensorboard_folder.py.

An event carries a mark of ours in a field that TensorBoard no longer uses (`node_name` of its first value): which row
it came from.
"""

import itertools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: messages that are made from descriptors, and JSON

from services.metrics.sinks.absent import absent

with absent("torch", "matplotlib"):  # tensorboardX takes what it finds: two seconds and 150 MB for nothing
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto import event_pb2, summary_pb2
    from tensorboardX.summary import text as text_summary

_events: Any = event_pb2
_summaries: Any = summary_pb2
_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MARK = "furlong"
MAX_CELL_CHARS = 2_000


@dataclass(frozen=True)
class Place:
    """Which row an event shows."""

    row_id: int
    attempt: int
    step: int
    time_s: float


@dataclass(frozen=True)
class Point:
    """An event: the values of one step."""

    place: Place
    values: Mapping[str, Any]
    """Tag -> Summary.Value."""


@dataclass(frozen=True)
class Purge:
    """From here on nothing at or after the step counts; the next num_points events stand for what is kept of it."""

    step: int
    num_points: int


def values_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row shows, by tag."""
    found = {tag: _summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in row["values"].items()}
    for tag, spread in row["histograms"].items():
        found[tag] = _summaries.Summary.Value(tag=tag, histo=_histogram(spread))
    for tag, table in row["tables"].items():
        value = text_summary(tag, _markdown(table)).value[0]
        found[value.tag] = value
    return found


def encode_point(point: Point) -> bytes:
    """One record."""
    place = point.place
    event = _events.Event(wall_time=place.time_s, step=place.step)
    event.summary.value.extend(point.values.values())
    event.summary.value[0].node_name = f"{_MARK} {place.row_id} {place.attempt}"
    return _frame(event.SerializeToString())


def encode_purge(purge: Purge, *, time_s: float) -> bytes:
    """One record: TensorBoard forgets what stands at the step and after it in the folder."""
    event = _events.Event(wall_time=time_s, step=purge.step)
    event.session_log.status, event.session_log.msg = _events.SessionLog.START, f"{_MARK} {purge.num_points}"
    return _frame(event.SerializeToString())


def encode_header(*, time_s: float) -> bytes:
    """The first record of a file."""
    return _frame(_events.Event(wall_time=time_s, file_version="brain.Event:2").SerializeToString())


def read_file(path: Path) -> Iterator[Point | Purge]:
    """What stands in a file of ours. A last record that is not whole is left out."""
    content = path.read_bytes()
    at = 0
    while at + _HEADER.size + _CRC.size <= len(content):
        length, _ = _HEADER.unpack_from(content, at)
        begin, end = at + _HEADER.size, at + _HEADER.size + length
        is_last = end + _CRC.size >= len(content)
        if is_last and (end + _CRC.size > len(content) or _masked(content[begin:end]) != _crc_at(content, end)):
            return
        found = _parse(content[begin:end])
        if found is not None:
            yield found
        at = end + _CRC.size


def _parse(content: bytes) -> Point | Purge | None:
    event = _events.Event()
    event.ParseFromString(content)
    if event.HasField("session_log") and event.session_log.msg.startswith(_MARK):
        return Purge(event.step, int(event.session_log.msg.split()[1]))
    if not event.HasField("summary") or not event.summary.value:
        return None
    mark, _, numbers = event.summary.value[0].node_name.partition(" ")
    if mark != _MARK:
        return None
    row_id, attempt = map(int, numbers.split())
    event.summary.value[0].node_name = ""
    return Point(
        Place(row_id, attempt, event.step, event.wall_time), {value.tag: value for value in event.summary.value}
    )


def _crc_at(content: bytes, at: int) -> int:
    crc: int = _CRC.unpack_from(content, at)[0]
    return crc


def _frame(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _CRC.pack(_masked(length)) + content + _CRC.pack(_masked(content))


def _masked(content: bytes) -> int:
    crc = crc32c(content)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _histogram(spread: Mapping[str, Any]) -> Any:
    """Counts between edges. Sums are taken as if each bin's numbers stood in its middle."""
    edges, counts = [float(edge) for edge in spread["edges"]], [float(count) for count in spread["counts"]]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    return _summaries.HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        sum_squares=sum(count * middle * middle for count, middle in zip(counts, middles, strict=True)),
        bucket_limit=edges[1:],
        bucket=counts,
    )


def _markdown(table: Mapping[str, Any]) -> str:
    columns = [_cell(column) for column in table["columns"]]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in table["rows"]]
    return "\n".join([*lines, *(["", "(cut)"] if table.get("cut") else [])])


def _cell(value: object) -> str:
    text = "" if value is None else str(value)[:MAX_CELL_CHARS]
    for character, instead in (("\\", "\\\\"), ("|", "\\|"), ("\r", ""), ("\n", "<br>"), ("`", "\\`")):
        text = text.replace(character, instead)
    return text
