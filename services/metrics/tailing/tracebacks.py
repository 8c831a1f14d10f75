"""Joins the lines of a Python traceback into one: also chained ones, groups, and those that Ray prints interleaved.

Bounded in lines, bytes and time: a traceback that is longer is cut into several. Pure: time is an argument.
"""

import re
from dataclasses import dataclass, field, replace

from services.metrics.tailing.heading import TextLine

MAX_LINES = 1_000
MAX_BYTES = 256 * 1024
IDLE_S = 1.0
"""After so much silence a traceback is whole."""
MAX_AGE_S = 10.0
MAX_OPEN = 64

_START = "Traceback (most recent call last):"
_FINAL = re.compile(r"(?:[A-Za-z_][\w.<>]*\.)?[A-Za-z_]\w*(?:\(\S*\))?(?::(?: .*|$)|$)")
_GROUP_END = re.compile(r" +\+-{16,}")
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


@dataclass(slots=True)
class _Open:
    """A traceback that may go on."""

    first: TextLine
    lines: list[str]
    size_bytes: int
    began_s: float
    touched_s: float
    has_final: bool = False
    blanks: int = 0


@dataclass(slots=True)
class Joiner:
    """The tracebacks of one file that are not whole yet, by stream."""

    open: dict[str, _Open] = field(default_factory=dict)

    def add(self, line: TextLine, now_s: float) -> list[TextLine]:
        """What is whole once this line has come, in order."""
        if not self.open and _START not in line.text:
            return [line] if line.text.strip() else []
        known = self.open.get(line.stream)
        if known is not None and self._goes_on(known, line):
            return self._append(known, line, now_s)
        done: list[TextLine] = []
        if known is not None and (known.has_final or not line.is_dated):
            done += self._take(line.stream)
        if line.text.rstrip().endswith(_START) and line.stream not in self.open:
            self._begin(line, now_s, done)
        elif line.text.strip():
            done.append(line)
        return done

    def close_idle(self, now_s: float) -> list[TextLine]:
        """Those that have waited long enough."""
        if not self.open:
            return []
        over = [
            stream
            for stream, item in self.open.items()
            if now_s - item.touched_s >= IDLE_S or now_s - item.began_s >= MAX_AGE_S
        ]
        return [line for stream in over for line in self._take(stream)]

    def close_all(self) -> list[TextLine]:
        """All, as they are."""
        return [line for stream in list(self.open) for line in self._take(stream)]

    def dump(self) -> list[dict[str, object]]:
        """For a mark."""
        return [
            {
                "first": [item.first.ts, item.first.level, item.first.actor, item.first.pid, item.first.ip],
                "lines": item.lines,
                "final": item.has_final,
                "blanks": item.blanks,
            }
            for item in self.open.values()
        ]

    def load(self, dumped: list[dict[str, object]], now_s: float) -> None:
        """The inverse. Their time begins anew."""
        for item in dumped:
            lines = [str(line) for line in item["lines"]]  # type: ignore[union-attr]
            ts, level, actor, pid, ip = map(str, item["first"])  # type: ignore[call-overload]
            first = TextLine("", ts, level, actor, pid, ip)
            size = sum(map(len, lines))
            self.open[first.stream] = _Open(
                first, lines, size, now_s, now_s, bool(item["final"]), int(str(item["blanks"]))
            )

    def _begin(self, line: TextLine, now_s: float, done: list[TextLine]) -> None:
        if len(self.open) >= MAX_OPEN:
            done += self._take(next(iter(self.open)))
        first = replace(line, level="error" if line.level == "info" else line.level)
        self.open[line.stream] = _Open(first, [line.text], len(line.text), now_s, now_s)

    def _goes_on(self, known: _Open, line: TextLine) -> bool:
        text = line.text
        if not text.strip() or text.startswith("ray::"):
            return True
        if text[0] in " \t":
            return not (known.has_final and known.blanks and text.lstrip()[0] not in "|+")  # a gap: something else
        if line.is_dated:
            return False
        if text.startswith((*_CHAIN, _START)):
            return True
        return not known.has_final and _FINAL.fullmatch(text.rstrip()) is not None

    def _append(self, known: _Open, line: TextLine, now_s: float) -> list[TextLine]:
        text = line.text.rstrip()
        known.touched_s = now_s
        if not text:
            known.blanks = min(known.blanks + 1, 3)
            return []
        known.lines += [""] * known.blanks
        known.lines.append(text)
        known.size_bytes += len(text) + known.blanks
        known.blanks = 0
        if text.startswith((*_CHAIN, _START)):
            known.has_final = False
        elif (text[0] not in " \t" and not text.startswith("ray::")) or _GROUP_END.fullmatch(text):
            known.has_final = True
        if len(known.lines) < MAX_LINES and known.size_bytes < MAX_BYTES:
            return []
        whole = self._take(line.stream)
        self.open[line.stream] = _Open(known.first, [], 0, known.began_s, now_s)
        return whole

    def _take(self, stream: str) -> list[TextLine]:
        item = self.open.pop(stream)
        return [replace(item.first, text="\n".join(item.lines))] if item.lines else []
