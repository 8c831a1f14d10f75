"""Which values of an environment are secret, by the names of its variables. Pure, but for files that variables name.

A header list, a URL or a DSN holds more than its secret: only the parts that let somebody in are taken, so that a host,
a content type or a region stays legible in every line.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

MIN_CHARS = 6
"""A shorter value would be found in every line."""
_MIN_UNNAMED_CHARS = 16
"""Of a header whose name does not tell that it is secret, and of a URL's path."""
_MAX_FILE_BYTES = 4096
_SCHEME = re.compile(r"^(?:bearer|basic|token|digest|apikey|bot)\s+", re.IGNORECASE)
_TELLING = re.compile(r"auth|token|secret|key|password|passwd|cookie|credential|signature", re.IGNORECASE)
_WORDS = re.compile(r"[a-z ,;/+._*=-]*")
"""What no random value looks like: `application/json`, `gzip, deflate`."""
_PASSWORD = re.compile(r"\b(?:password|pwd|passwd|secret|token|api_?key)\s*=\s*('[^']*'|[^\s;&]+)", re.IGNORECASE)


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """The values that must appear in no line; one may be spelled in several ways."""
    found: set[str] = set()
    for name, value in environment.items():
        upper = name.upper()
        given = value.strip()
        if upper.endswith("_FILE"):
            upper = upper.removesuffix("_FILE")
            given = _first_line(Path(given)) if _reader_of(upper) else given
        reader = _reader_of(upper) or _url_password
        found.update(part for part in reader(given) if len(part) >= MIN_CHARS)
    return sorted(found)


def _reader_of(upper_name: str) -> Callable[[str], Iterator[str]] | None:
    return next((reader for suffixes, reader in _READERS if upper_name.endswith(suffixes)), None)


def _whole(value: str) -> Iterator[str]:
    yield value


def _authorization(value: str) -> Iterator[str]:
    """`Bearer abc`, and abc."""
    for form in {value, unquote(value)}:
        bare = _SCHEME.sub("", form)
        yield bare
        if bare != form:
            yield form


def _headers(value: str) -> Iterator[str]:
    """`name=value,name=value`, values percent-encoded or not; also `Name: value`."""
    for item in re.split(r"[,\n]", value):
        name, _, given = item.partition("=") if "=" in item.partition(":")[0] else item.partition(":")
        for form in {given.strip(), unquote(given.strip())}:
            if _TELLING.search(name):
                yield from _authorization(form)
            elif len(form) >= _MIN_UNNAMED_CHARS and not _WORDS.fullmatch(form):
                yield form


def _webhook(value: str) -> Iterator[str]:
    """A URL that lets in whoever knows it; its host alone is no secret."""
    rest = _after_host(value)
    if len(rest) > 1:
        yield value
    if len(rest) >= _MIN_UNNAMED_CHARS:
        yield rest
    yield from _url_password(value)


def _dsn(value: str) -> Iterator[str]:
    """`scheme://user:password@host/x`, `https://key@host/1`, or `host=h password=p`."""
    parts = list(_url_password(value))
    parts += [match.strip("'") for match in _PASSWORD.findall(value)]
    if "://" in value and not parts:
        user = _user(value)
        parts = [user] if user else []
    elif not parts:
        parts = [value]
    if parts:
        yield value
    yield from parts


def _credentials(value: str) -> Iterator[str]:
    """`user:password`, or one value; not a path to a file that holds them."""
    if value.startswith(("/", "~", "./", "../")) or Path(value).suffix == ".json":
        return
    if "://" in value:
        yield from _dsn(value)
        return
    yield value
    yield value.partition(":")[2]


def _url_password(value: str) -> Iterator[str]:
    """The password within a URL, of any variable: a proxy's or a database's."""
    if "://" not in value or "@" not in value:
        return
    try:
        password = urlsplit(value).password or ""
    except ValueError:  # no URL after all
        return
    if password:
        yield password
        yield unquote(password)


def _user(value: str) -> str:
    try:
        return urlsplit(value).username or ""
    except ValueError:
        return ""


def _after_host(value: str) -> str:
    try:
        parts = urlsplit(value)
    except ValueError:
        return value
    return parts.path + (f"?{parts.query}" if parts.query else "")


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace").strip().split("\n")[0].strip()
    except (OSError, ValueError):
        return ""


_READERS: tuple[tuple[tuple[str, ...], Callable[[str], Iterator[str]]], ...] = (
    (("_KEY", "_TOKEN", "_SECRET", "PASSWORD"), _whole),
    (("AUTHORIZATION",), _authorization),
    (("_HEADERS",), _headers),
    (("WEBHOOK_URL",), _webhook),
    (("_DSN",), _dsn),
    (("_CREDENTIALS",), _credentials),
)
