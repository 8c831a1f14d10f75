"""Worker addresses: from what a client sent to one normal form, so that a worker has one entry. Pure; resolves nothing.

Refused: anything but http and https, credentials, paths, addresses that no engine has (link-local, such as a cloud's
metadata service; multicast; unspecified), spellings of addresses that only some resolvers understand, and hosts outside
the allow-list.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from furlong.addresses import join_host_port

MAX_URL_CHARS = 2048
MAX_HOST_CHARS = 253
MAX_LABEL_CHARS = 63
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
DEFAULT_PORTS = {"http": 80, "https": 443}

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class BadWorker(ValueError):
    """What was sent to register a worker is refused; the message gives key, value, rule and remedy."""


class BadUrl(BadWorker):
    """A worker address that is refused; the message gives value, rule and remedy."""


@dataclass(frozen=True)
class WorkerUrl:
    """A worker's base address in its normal form."""

    scheme: str
    host: str
    """Lower case, IPv6 without brackets."""
    port: int

    @property
    def netloc(self) -> str:
        """HOST or HOST:PORT as in a Host header: without the scheme's default port."""
        if self.port == DEFAULT_PORTS[self.scheme]:
            return f"[{self.host}]" if ":" in self.host else self.host
        return join_host_port(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}"


def parse_worker_url(value: object, *, allowed: Sequence[str] = ()) -> WorkerUrl:
    """The normal form of what a client sent as a worker's address. Raises BadUrl.

    allowed: hosts, HOST:PORT, or networks in CIDR form that workers may have; empty: any.
    """
    text = _checked_text(value)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _bad(text, f"must be a URL: {error}") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise _bad(text, "must begin with http:// or https://")
    if "@" in parts.netloc:
        raise BadUrl("url = (hidden): must hold no user name or password. Example: http://127.0.0.1:30000")
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        raise _bad(text, "must be a base address, without path, query or fragment")
    if port == 0:
        raise _bad(text, "must have a port from 1 to 65535")
    host = _normal_host(text, parts.hostname)
    url = WorkerUrl(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme])
    if allowed and not any(_allows(entry, url) for entry in allowed):
        raise _bad(text, "is not in --router-worker-allow")
    return url


def refused_address(address: str) -> str:
    """Why no worker can be at this IP address; empty when one can."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = _within(ip) or ip
    for kind in ("link_local", "multicast", "unspecified"):
        if getattr(ip, f"is_{kind}"):
            return f"{ip} is a {kind.replace('_', '-')} address"
    return f"{ip} is the broadcast address" if str(ip) == "255.255.255.255" else ""


def _within(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address leads to: mapped, by 6to4, or by NAT64."""
    if ip in NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour


def _checked_text(value: object) -> str:
    if not isinstance(value, str):
        raise BadUrl(f"url must be a string, got {type(value).__name__}. Example: http://127.0.0.1:30000")
    if len(value) > MAX_URL_CHARS:
        raise BadUrl(f"url must have at most {MAX_URL_CHARS} characters, got {len(value)}")
    if not value.isascii() or any(char <= " " or char in '\x7f\\<>"`{}|^%' for char in value):
        raise _bad(value, "must be printable ASCII without spaces and escapes")
    return value


def _normal_host(text: str, host: str | None) -> str:
    host = (host or "").rstrip(".")
    if not host:
        raise _bad(text, "must have a host")
    try:
        ip: IpAddress | None = ipaddress.ip_address(host)
    except ValueError:
        ip = None
    if ip is None:
        if ":" in host or host.rsplit(".", 1)[-1][:1].isdigit():  # resolvers read 0x7f.1 or 2130706433 as addresses
            raise _bad(text, "must have a host name or an address such as 127.0.0.1 or [::1]")
        if len(host) > MAX_HOST_CHARS or not all(0 < len(label) <= MAX_LABEL_CHARS for label in host.split(".")):
            raise _bad(text, f"must have a host of parts of 1 to {MAX_LABEL_CHARS} characters (RFC 1035)")
        return host
    if reason := refused_address(host):
        raise _bad(text, f"cannot be a worker: {reason}")
    return str(ip)


def _allows(entry: str, url: WorkerUrl) -> bool:
    if entry.lower() in (url.host, join_host_port(url.host, url.port)):
        return True
    try:
        return ipaddress.ip_address(url.host) in ipaddress.ip_network(entry)
    except ValueError:
        return False


def _bad(text: str, rule: str) -> BadUrl:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return BadUrl(f"url = {shown!r}: {rule}. Example: http://127.0.0.1:30000")
