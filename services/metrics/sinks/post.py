"""POSTs to programs that others run: with limits, without redirects, never naming more of a URL than its host.

The rest of a URL may hold a secret. A proxy of the environment is used, but not for this machine itself.
"""

import datetime
import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

import aiohttp

from furlong.config.destinations import is_loopback
from furlong.jsonline import Secrets

CONNECT_LIMIT_S = 10.0
MAX_ANSWER_BYTES = 64 * 1024
MAX_RETRY_AFTER_S = 300.0


class PostFailed(Exception):
    """The other side did not take it; the text says why, without secrets."""

    status = 0
    """What it answered. 0: nothing."""


class NotNow(PostFailed):
    """It says that a later try may do."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        """As it asked; the sink's task waits that long. 0: it did not say."""


class Unacceptable(PostFailed):
    """It will never take this body; a part of it perhaps."""


REFUSALS = frozenset({400, 413, 422})
LATER = frozenset({408, 425, 429})
_UNREADABLE = "[a URL that cannot be read]"


@dataclass(frozen=True)
class Answer:
    """A success."""

    body: bytes
    content_type: str


class Poster:
    """One URL, one connection or a few."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, limit_s: float = 30.0) -> None:
        self.where = shown(url)
        """The URL as it may be shown."""
        self._url, self._headers, self._limit_s = url, dict(headers or {}), limit_s
        self._secrets = Secrets([*secrets_in(url), *self._headers.values()])
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """The answer of a success. Raises NotNow, Unacceptable or PostFailed, within limit_s seconds."""
        try:
            async with self._open().post(
                self._url, data=body, headers={**self._headers, **headers}, allow_redirects=False
            ) as response:
                answer = await _read(response)
                self._judge(response, answer)
                return Answer(answer, response.content_type)
        except TimeoutError as error:
            raise PostFailed(f"{self.where} did not answer within {self._limit_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise PostFailed(f"cannot reach {self.where}: {error.os_error.strerror or error.os_error}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # their texts may hold the URL
            raise PostFailed(f"cannot post to {self.where}: {type(error).__name__}") from None

    async def close(self) -> None:
        """Let go of the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._limit_s, sock_connect=CONNECT_LIMIT_S),
                connector=aiohttp.TCPConnector(limit=4),
                trust_env=not is_loopback(urlsplit(self._url).hostname or ""),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _judge(self, response: aiohttp.ClientResponse, answer: bytes) -> None:
        status = response.status
        if 200 <= status < 300:
            return
        said = self._secrets.redact(answer[:300].decode(errors="replace").strip())
        text = f"{self.where} answered {status}" + (f": {said}" if said else "")
        failed = PostFailed(text)
        if 300 <= status < 400:
            failed = PostFailed(f"{self.where} answered {status}: redirects are not followed, give the final URL")
        elif status in REFUSALS:
            failed = Unacceptable(text)
        elif status in LATER or status >= 500:
            failed = NotNow(text, retry_after_s(response.headers.get("Retry-After", "")))
        failed.status = status
        raise failed


def retry_after_s(header: str, now: float | None = None) -> float:
    """Seconds that a Retry-After asks for, in either form, at most MAX_RETRY_AFTER_S. 0: none that can be read."""
    try:
        seconds = float(header) if header.strip().isdigit() else _until(header, time.time() if now is None else now)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(MAX_RETRY_AFTER_S, max(0.0, seconds))


def shown(url: str) -> str:
    """Scheme, host and port."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return _UNREADABLE
    if not parts.scheme:
        return _UNREADABLE
    return f"{parts.scheme}://{parts.hostname or ''}{port}"


def secrets_in(url: str) -> list[str]:
    """The parts of a URL that may be secret: all but scheme, host, port and short names of folders."""
    parts = urlsplit(url)
    folders = [part for part in parts.path.split("/") if len(part) >= 16]
    return [*folders, parts.password or "", *(value for _, value in parse_qsl(parts.query))]


def _until(header: str, now: float) -> float:
    moment = email.utils.parsedate_to_datetime(header)
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp() - now


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for piece in response.content.iter_chunked(8 * 1024):
        parts.append(piece)
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            break
    return b"".join(parts)
