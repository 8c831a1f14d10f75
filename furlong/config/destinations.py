"""What the places must look like that rows go to and that lines come from. Nothing is resolved or asked, and
nothing opened but the files that hold URLs.

The flags are checked here, before anything starts; sinks that are added live are checked with the same functions.
"""

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from furlong.config.errors import Problem
from furlong.config.sections import MetricsSection

_HIDDEN = "(not shown)"  # a path or a query may be a secret


def url_of(given: str) -> str:
    """The URL itself; of `@FILE` the one that stands in the file. Raises ValueError naming the file that cannot be
    read."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"names {given[1:]}, which cannot be read: {why}") from error


def url_problem(url: str) -> str:
    """What is wrong with a URL to post to. Empty: nothing."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "must be a URL such as http://host:4318"
    return ""


def given_url_problem(given: str) -> str:
    """What is wrong with a URL, or `@FILE`, of a flag. Empty: nothing. Reads the file."""
    try:
        return url_problem(url_of(given))
    except ValueError as error:
        return str(error)


def is_loopback(host: str) -> bool:
    """Whether a host is an address of the loopback interface, or the name for it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_and_port(addr: str) -> tuple[str, int] | None:
    """The parts of `HOST:PORT`, brackets of IPv6 taken off; None when it is none."""
    host, _, port = addr.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def scraped(given: str) -> tuple[str, str]:
    """Instance and URL of `URL` or `INSTANCE=URL`. Raises ValueError saying what is wrong."""
    name, sign, url = given.partition("=")
    if not sign or "://" in name or "/" in name:
        name, url = "", given
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST:PORT/PATH, or INSTANCE= before it")
    if parts.username or parts.password:
        raise ValueError("must hold no user and no password")
    if not parts.path:
        parts = parts._replace(path="/metrics")
    return name or parts.netloc, urlunsplit(parts)


def check_destinations(metrics: MetricsSection) -> list[Problem]:
    """Everything that is wrong with the addresses."""
    found = []
    if metrics.statsd_addr and host_and_port(metrics.statsd_addr) is None:
        found.append(
            Problem("metrics.statsd_addr", metrics.statsd_addr, "must be HOST:PORT", "Such as 127.0.0.1:8125.")
        )
    for name in ("otlp_endpoint", "metrics_webhook"):
        if (url := getattr(metrics, name)) and (rule := given_url_problem(url)):
            found.append(Problem(f"metrics.{name}", _HIDDEN, rule))
    uri = metrics.mlflow_tracking_uri
    if uri.startswith("http") and (rule := url_problem(uri)):
        found.append(Problem("metrics.mlflow_tracking_uri", _HIDDEN, rule))
    return [*found, *scrape_problems(metrics.scrape)]


def scrape_problems(urls: Iterable[str]) -> list[Problem]:
    """What is wrong with the endpoints to read."""
    found = []
    for url in urls:
        try:
            scraped(url)
        except ValueError as error:
            shown = url if "@" not in url else url.rpartition("@")[2]
            remedy = "For example --scrape http://127.0.0.1:30000/metrics, or engine-0=http://..."
            found.append(Problem("metrics.scrape", shown, str(error), remedy))
    return found


def tail_problems(patterns: Iterable[str]) -> list[Problem]:
    """What is wrong with the paths of files to follow. Looks whether they are folders."""
    found = []
    for pattern in patterns:
        if not pattern:
            found.append(Problem("metrics.tail", repr(pattern), "must name a file or a glob", "Leave it out."))
        elif os.path.isdir(pattern):
            inside = f"{pattern.rstrip('/')}/*.log"
            remedy = f"Name the files in it: --tail '{inside}', or '{pattern.rstrip('/')}/**/*.log' for all below it."
            found.append(Problem("metrics.tail", pattern, "must name files, not a folder", remedy))
    return found
