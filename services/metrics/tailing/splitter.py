"""From the bytes of a file to its lines: bounded memory, whatever stands in it. Pure; knows no file.

A line ends with a newline. What has none yet waits in `buffer`; who holds the splitter decides when it has waited long
enough. Every byte is handed out once or is dropped by a rule that stands here: the earlier states of a progress bar,
what a line has beyond its limit, and the holes of NUL bytes that a file cut in place is left with.
"""

from dataclasses import dataclass

MAX_LINE_BYTES = 1024 * 1024
"""A longer line is handed out cut to this, with a mark; the rest of it is dropped."""
_BAR_BYTES = 64 * 1024
"""A bar that was never ended by a newline is cut to its last state from here on."""


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line without its end."""

    content: bytes
    clipped: bool = False
    """It was longer."""
    partial: bool = False
    """Its end had not come when it was handed out."""
    continued: bool = False
    """Its beginning was handed out before, as partial."""


@dataclass(slots=True)
class Splitter:
    """The state between two reads."""

    buffer: bytes = b""
    """The beginning of a line whose end has not come."""
    skipping: bool = False
    """What comes up to the next newline belongs to a line that was clipped."""
    continued: bool = False
    """What comes up to the next newline belongs to a line whose beginning was handed out as partial."""

    def feed(self, chunk: bytes) -> tuple[list[RawLine], bytes]:
        """The lines that are whole now, and the bytes that are done with: what was read is those and `buffer`."""
        content = self.buffer + chunk
        end = content.rfind(b"\n") + 1
        lines = self._whole(content[:end]) if end else []
        self.buffer = content[end:]
        cut = self._shorten(lines) if len(self.buffer) >= _BAR_BYTES else 0
        return lines, content[: end + cut]

    def flush(self) -> tuple[list[RawLine], bytes]:
        """What waits, as the partial line that it is, and its bytes."""
        content, self.buffer = self.buffer, b""
        if self.skipping or not content.strip(b"\0\r\n\t "):
            return [], content
        line = RawLine(last_state(content), partial=True, continued=self.continued)
        self.continued = True
        return [line], content

    def _whole(self, content: bytes) -> list[RawLine]:
        parts = content.split(b"\n")
        parts.pop()
        lines = []
        if self.skipping:
            parts, self.skipping = parts[1:], False
        elif self.continued:
            lines.append(_clip(parts[0], continued=True))
            parts = parts[1:]
        self.continued = False
        if len(content) <= MAX_LINE_BYTES and b"\r" not in content:
            return lines + [RawLine(part) for part in parts]
        return lines + [_clip(part) for part in parts]

    def _shorten(self, lines: list[RawLine]) -> int:
        """Take what is done with off the buffer; how many bytes. The last byte stays: half of a line's end."""
        size = len(self.buffer)
        if self.skipping or not self.buffer.strip(b"\0"):
            self.buffer = b""
            return size
        cut = max(0, self.buffer.rfind(b"\r", 0, size - 1))
        if size - cut >= MAX_LINE_BYTES:
            lines.append(RawLine(self.buffer[cut : cut + MAX_LINE_BYTES], clipped=True, continued=self.continued))
            self.skipping, cut = True, size
        self.buffer = self.buffer[cut:]
        return cut


def last_state(content: bytes) -> bytes:
    """A progress bar writes each state over the last one: the last that is not blank counts."""
    if b"\r" not in content:
        return content
    for state in reversed(content.split(b"\r")):
        if state.strip():
            return state
    return b""


def _clip(content: bytes, *, continued: bool = False) -> RawLine:
    content = last_state(content)
    if len(content) <= MAX_LINE_BYTES:
        return RawLine(content, continued=continued)
    return RawLine(content[:MAX_LINE_BYTES], clipped=True, continued=continued)
