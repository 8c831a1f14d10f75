"""Levels of log lines, however their writer spells them, as the numbers of the standard library. Pure."""

DEBUG, INFO, WARNING, ERROR, CRITICAL = 10, 20, 30, 40, 50
NAMES = {DEBUG: "debug", INFO: "info", WARNING: "warning", ERROR: "error", CRITICAL: "critical"}
_SPELLED = {
    "trace": DEBUG,
    "verbose": DEBUG,
    "debug": DEBUG,
    "info": INFO,
    "information": INFO,
    "notice": INFO,
    "warn": WARNING,
    "warning": WARNING,
    "err": ERROR,
    "error": ERROR,
    "exception": ERROR,
    "crit": CRITICAL,
    "critical": CRITICAL,
    "fatal": CRITICAL,
    "alert": CRITICAL,
    "panic": CRITICAL,
    "emerg": CRITICAL,
    "emergency": CRITICAL,
}


def level_number(level: object) -> int:
    """10, 20, 30, 40 or 50, the nearest below. What is no level counts as info."""
    if isinstance(level, str):
        known = _SPELLED.get(level)
        if known is not None:
            return known
        lowered = level.strip().lower()
        if lowered in _SPELLED:
            return _SPELLED[lowered]
        return level_number(int(lowered)) if lowered.isascii() and lowered.isdigit() and len(lowered) < 4 else INFO
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not level >= 0:
        return INFO
    return max((number for number in NAMES if number <= level), default=DEBUG)
