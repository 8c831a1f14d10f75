"""Which log lines somebody wants to see. Pure: the service, the command line and a dead run's reader use the same."""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from furlong.asking.levels import level_number

_METRICS = b'"event":"metrics"'


@dataclass(frozen=True)
class LogFilter:
    """What a line must be; a field that is None asks nothing."""

    run: str | None = None
    service: str | None = None
    instance: str | None = None
    level: int = 0
    """The lowest level, as a number."""
    rollout_id: int | None = None
    text: str | None = None
    """Stands somewhere in the line, in letters of any case."""

    def may_match(self, lines: bytes) -> bool:
        """Whether it is worth to look at these lines one by one."""
        for value in (self.service, self.instance):
            if value is not None and orjson.dumps(value) not in lines:
                return False
        if self.rollout_id is not None and str(self.rollout_id).encode() not in lines:
            return False
        return self.text is None or self._has_text(lines)

    def match(self, line: bytes) -> Mapping[str, object] | None:
        """The line's fields, or None when it is not wanted. Metrics records and what is no record are no lines."""
        if not self.may_match(line) or _is_plainly_metrics(line):
            return None
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(fields, dict) or fields.get("event") == "metrics":
            return None
        asked = (("run", self.run), ("service", self.service), ("instance", self.instance))
        if any(value is not None and fields.get(key) != value for key, value in asked):
            return None
        if self.rollout_id is not None and fields.get("rollout_id") != self.rollout_id:
            return None
        return fields if self.level <= 10 or level_number(fields.get("level")) >= self.level else None

    def _has_text(self, lines: bytes) -> bool:
        """As it stands there, or as it stands within a string."""
        assert self.text is not None
        text = self.text.encode("utf-8", "replace").decode().lower()
        needles = {text, orjson.dumps(text)[1:-1].decode()}
        if all(needle.isascii() for needle in needles):
            lowered = lines.lower()
            return any(needle.encode() in lowered for needle in needles)
        whole = lines.decode("utf-8", "replace").lower()
        return any(needle in whole for needle in needles)


def _is_plainly_metrics(line: bytes) -> bool:
    """Whether it can be told without parsing: the only `event` stands before any inner object.

    Quotes within a string are escaped, so that what is found is a key; before the first inner brace it is the line's.
    """
    at = line.find(_METRICS)
    if at < 0:
        return False
    inner = line.find(b"{", 1)
    return (inner < 0 or at < inner) and line.count(b'"event"') == 1
