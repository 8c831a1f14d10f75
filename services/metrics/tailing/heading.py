"""What a line of text says of itself: when, how bad, and which process of Ray it came from. Pure.

A time without a zone is this machine's local time, as SGLang, Ray and Python's logging write it.
"""

import datetime
import re
from dataclasses import dataclass

from furlong.asking.levels import NAMES, level_number

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_RAY = re.compile(
    r"\((?:(?P<actor>[A-Za-z_][\w:.<>\[\]-]*) )?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?\)(?: ?\[repeated [^\]]*\])? ?"
)
_TIME = re.compile(
    r"(?P<second>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](?P<fraction>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_SHORT_TIME = re.compile(r"(?:[A-Z]+ )?(?P<month>\d\d)-(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)\b")
_LEVEL = re.compile(
    r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b"
    r"|(?:^|\[|level=\"?|<)(debug|info|warning|warn|error|critical|fatal)\b|[A-Za-z](Warning): "
)
_GLOG = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d")
_GLOG_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical"}
_HEAD_CHARS = 120
_BRACKETED = 32
"""A time stands within the first few characters, after a bracket or a level."""


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of text, or several that belong together."""

    text: str
    ts: str
    level: str
    actor: str = ""
    pid: str = ""
    ip: str = ""
    is_dated: bool = False
    """The line says its time itself."""

    @property
    def stream(self) -> str:
        """Lines of one stream follow each other; those of others stand between them."""
        return f"{self.actor}/{self.pid}/{self.ip}"


class HeadingReader:
    """Reads headings; remembers the last second, since lines come in bursts."""

    def __init__(self) -> None:
        self._second, self._seconds_text = "", ""

    def read(self, text: str, *, now: datetime.datetime) -> TextLine:
        """The line with what its heading says. now: in UTC, for a line that says no time."""
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        actor = pid = ip = ""
        if text.startswith("(") and (ray := _RAY.match(text)):
            actor, pid, ip = (ray[name] or "" for name in ("actor", "pid", "ip"))
            text = text[ray.end() :]
        ts = self._time(text, now)
        return TextLine(text, ts or _utc(now), _level(text[:_HEAD_CHARS]), actor, pid, ip, is_dated=bool(ts))

    def _time(self, text: str, now: datetime.datetime) -> str:
        head = text[: _BRACKETED + 40]
        found = _TIME.search(head)
        if found is None or found.start() > _BRACKETED:
            short = _SHORT_TIME.match(head)
            return self._short_time(short, now) if short else ""
        zone = found["zone"] or ""
        key = found["second"] + zone
        if key != self._second:
            try:
                moment = datetime.datetime.fromisoformat(key).astimezone(datetime.UTC)
            except (ValueError, OverflowError):  # 2026-13-45
                return ""
            self._second, self._seconds_text = key, moment.strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._seconds_text}.{(found['fraction'] or '').ljust(6, '0')[:6]}Z"

    def _short_time(self, found: "re.Match[str]", now: datetime.datetime) -> str:
        """Without a year: the year in which it is not in the future."""
        local = now.astimezone()
        for year in (local.year, local.year - 1):
            try:
                moment = datetime.datetime.fromisoformat(f"{year}-{found['month']}-{found['day']}T{found['time']}")
            except ValueError:
                continue
            if moment.astimezone() <= now + datetime.timedelta(days=1):
                return _utc(moment.astimezone(datetime.UTC))
        return ""


def _level(head: str) -> str:
    if found := _LEVEL.search(head):
        word = found[found.lastindex or 1].lower()
        return NAMES[level_number(word)]
    if found := _GLOG.match(head):
        return _GLOG_LEVELS[found[1]]
    return "error" if "Traceback (most recent call last)" in head else "info"


def _utc(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
