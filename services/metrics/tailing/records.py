"""From the lines of one file to records: JSON objects as they are, everything else as `line` records. Pure.

{"event": "line", "ts": ..., "level": "info", "run": "arith", "service": "engine", "instance": "engine-0",
 "file": "/runs/arith/logs/engine-0.out", "text": "Decode batch, #running-req: 3, ..."}
"""

import datetime
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePath

import orjson

from services.metrics.tailing.heading import HeadingReader, TextLine
from services.metrics.tailing.pieces import JsonObject, pieces
from services.metrics.tailing.splitter import RawLine
from services.metrics.tailing.tracebacks import Joiner

MAX_TEXT_BYTES = 2 * 1024 * 1024
"""Of a record's JSON; text of control characters takes six times its size."""

_ENGINE = re.compile(r"(engine-\d+)\.out")
_ROTATED = re.compile(r"(?:[.-]\d[\d.-]*|\.(?:log|out|err|txt|jsonl?))+$")

OnText = Callable[[str, TextLine], None]
"""Called with the file's instance and each line of text: numbers may stand in it."""


@dataclass(slots=True)
class Counts:
    """Of one file, since it was first seen."""

    lines: int = 0
    bytes: int = 0
    records: int = 0
    clipped: int = 0
    invalid: int = 0
    """Lines with bytes that are no UTF-8; they were replaced."""
    welded: int = 0
    """Lines with more than one JSON object, or with a torn one."""
    partial: int = 0
    """Lines that were handed out before their end came."""
    nuls: int = 0
    """Lines with NUL bytes, which were left out."""
    joined: int = 0
    """Tracebacks of several lines."""
    truncations: int = 0

    @classmethod
    def from_dict(cls, given: dict[str, int]) -> "Counts":
        """The inverse of asdict; names that are not known are left out."""
        return cls(**{f.name: given.get(f.name, 0) for f in fields(cls)})


def _no_text(instance: str, line: TextLine) -> None:
    """Nobody listens."""


@dataclass
class LineReader:
    """Makes the records of one file."""

    path: str
    run: str
    on_text: OnText = _no_text
    counts: Counts = field(default_factory=Counts)
    joiner: Joiner = field(default_factory=Joiner)

    def __post_init__(self) -> None:
        name = PurePath(self.path).name
        engine = _ENGINE.fullmatch(name)
        self.service, self.instance = ("engine", engine[1]) if engine else (_ROTATED.sub("", name) or name, "")
        self._headings = HeadingReader()
        self._file = b',"file":' + orjson.dumps(self.path)
        self._run = b',"run":' + orjson.dumps(self.run)

    def read(self, lines: list[RawLine], *, now: datetime.datetime, now_s: float) -> list[bytes]:
        """The records of some lines. now_s: of the monotonic clock."""
        bodies: list[bytes] = []
        for line in lines:
            self._read_one(line, bodies, now, now_s)
        self.counts.lines += len(lines)
        self.counts.records += len(bodies)
        return bodies

    def close_idle(self, now_s: float) -> list[bytes]:
        """The tracebacks that have waited long enough."""
        return self._joined(self.joiner.close_idle(now_s))

    def close_all(self) -> list[bytes]:
        """The tracebacks that are not whole, as they are."""
        return self._joined(self.joiner.close_all())

    def dump_counts(self) -> dict[str, int]:
        """For a mark."""
        return asdict(self.counts)

    def _read_one(self, line: RawLine, bodies: list[bytes], now: datetime.datetime, now_s: float) -> None:
        content = line.content
        if b"\0" in content:
            content = content.replace(b"\0", b"")
            self.counts.nuls += 1
        content = content.rstrip(b"\r\n\t ")
        if not content:
            if self.joiner.open:  # a chained traceback has blank lines
                self._read_text("", line, bodies, now, now_s)
            return
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = content.decode(errors="replace")
            self.counts.invalid += 1
        self.counts.clipped += line.clipped
        self.counts.partial += line.partial
        if text[0] in "{ \t\ufeff" and text.lstrip("\ufeff \t").startswith("{") and not line.continued:
            self._read_json(content, text.lstrip("\ufeff"), line, bodies, now, now_s)
            return
        self._read_text(text, line, bodies, now, now_s)

    def _read_json(
        self, content: bytes, text: str, line: RawLine, bodies: list[bytes], now: datetime.datetime, now_s: float
    ) -> None:
        found = pieces(content.removeprefix(b"\xef\xbb\xbf"), text)
        self.counts.welded += len(found) > 1
        for piece in found:
            if isinstance(piece, JsonObject):
                bodies.append(self._object(piece))
            else:
                self._read_text(piece.rstrip(), line, bodies, now, now_s)

    def _read_text(self, text: str, line: RawLine, bodies: list[bytes], now: datetime.datetime, now_s: float) -> None:
        read = self._headings.read(text, now=now)
        self.on_text(self.instance or self.service, read)
        for whole in self.joiner.add(read, now_s):
            bodies.append(self._line(whole, line if whole is read else None))

    def _joined(self, lines: list[TextLine]) -> list[bytes]:
        self.counts.records += len(lines)
        return [self._line(line, None) for line in lines]

    def _object(self, found: JsonObject) -> bytes:
        more = b""
        if not isinstance(found.fields.get("run"), str) or not found.fields["run"]:
            if "run" in found.fields:  # of a kind that names no run
                return self._object(_with_fields(found, run=self.run))
            more += self._run
        if "file" not in found.fields:
            more += self._file
        if not more:
            return found.body
        body = found.body.rstrip()[:-1].rstrip()
        return (body + more if found.fields else body + more[1:]) + b"}"

    def _line(self, line: TextLine, raw: RawLine | None) -> bytes:
        record: dict[str, object] = {"ts": line.ts, "level": line.level, "event": "line", "run": self.run}
        record["service"] = self.service
        for name, value in (("instance", self.instance), ("actor", line.actor), ("pid", line.pid), ("ip", line.ip)):
            if value:
                record[name] = int(value) if name == "pid" else value
        record["file"], record["text"] = self.path, line.text
        if "\n" in line.text:
            self.counts.joined += 1
        if raw is not None:
            record.update({n: True for n in ("clipped", "partial", "continued") if getattr(raw, n)})
        body = orjson.dumps(record)
        if len(body) <= MAX_TEXT_BYTES:
            return body
        record["text"], record["clipped"] = line.text[: MAX_TEXT_BYTES // 6], True
        return orjson.dumps(record)


def _with_fields(found: JsonObject, **more: object) -> JsonObject:
    fields_ = {**found.fields, **more}
    return JsonObject(fields_, orjson.dumps(fields_))
