"""The token of control paths and of engines' admin paths: read from a file, compared in constant time.

Never logged, never shown, never passed on to a worker. The file may be replaced while the router runs: the new token
counts from then on, the old one no longer. A file that cannot be read then, or holds no token, changes nothing.
"""

import hmac
import os
from collections.abc import Iterable
from pathlib import Path

import structlog

from furlong.config import ConfigError
from furlong.config.errors import Problem

log = structlog.get_logger()

AUTHORIZATION = b"authorization"
SCHEME = b"bearer "
MAX_FILE_BYTES = 4096
AROUND = b"\"',;"
MAX_WORDS = 64
"""Of an Authorization header that goes on to a worker: more are not looked through."""
FLAG = "--router-token-file"
REMEDY = "Write one line of printable characters without spaces into it, for example by `openssl rand -hex 32`."

Headers = Iterable[tuple[bytes, bytes]]


class BadToken(Exception):
    """The file holds no token; the message says why."""


class Token:
    """The token that a file holds, or none at all."""

    def __init__(self, path: str) -> None:
        """path: "" for no token. Raises ConfigError."""
        self._path = path
        self._seen = (0, 0, 0)
        self._value = b""
        self._problem = ""
        """Why the token of before is still in force; empty: it is what the file holds."""
        if path:
            try:
                self._seen, self._value = _read(path)
            except BadToken as error:
                raise ConfigError([Problem(FLAG, path, str(error), REMEDY)]) from error

    def __repr__(self) -> str:
        return f"Token({self._path!r})"

    @property
    def needed(self) -> bool:
        """Whether there is a token."""
        return bool(self._path)

    def allows(self, headers: Headers) -> bool:
        """Whether a request with these headers (names in lower case) may do what the token protects.

        Without a token everything may that needs no token; see `needed`.
        """
        if not self._path:
            return True
        given = [value for name, value in headers if name == AUTHORIZATION]
        return len(given) == 1 and self.is_in(given[0])

    def is_in(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header is the token. False if there is no token."""
        if not self._path:
            return False
        self._read_again()
        value = authorization.strip()
        is_bearer = value[: len(SCHEME)].lower() == SCHEME
        return hmac.compare_digest(value[len(SCHEME) :].strip(), self._value) and is_bearer

    def is_within(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header has the token in it, rightly spelled or not."""
        if not self._path:
            return False
        self._read_again()
        words, token = authorization.split(), self._value.strip(AROUND)
        return len(words) > MAX_WORDS or any(hmac.compare_digest(word.strip(AROUND), token) for word in words)

    def without(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The headers, less an Authorization that has the token in it: what may go on to a worker."""
        return [(name, value) for name, value in headers if name != AUTHORIZATION or not self.is_within(value)]

    def _read_again(self) -> None:
        """Take over what the file holds by now."""
        try:
            if _signature(self._path) == self._seen:
                self._problem = ""
                return
            self._seen, value = _read(self._path)
        except (OSError, BadToken) as error:
            if str(error) != self._problem:  # once, not for each request
                self._problem = str(error)
                log.warning("router_token_kept", path=self._path, error=self._problem)
            return
        self._problem = ""
        if value != self._value:
            self._value = value
            log.info("router_token_changed", path=self._path)


def _signature(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> tuple[tuple[int, int, int], bytes]:
    """What tells one writing of the file from another, and the token. Raises BadToken."""
    try:
        seen = _signature(path)
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadToken(f"cannot be read: {error.strerror}") from error
    value = text.strip()
    if not value:
        raise BadToken("is empty")
    if len(text) > MAX_FILE_BYTES:
        raise BadToken(f"must have at most {MAX_FILE_BYTES} bytes")
    if any(not 0x21 <= byte <= 0x7E for byte in value):
        raise BadToken("must hold one line of printable characters without spaces")
    return seen, value
