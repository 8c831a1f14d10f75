"""What must hold between the router's fields, in a run and alone. Pure: reads no file, opens no socket."""

import ipaddress
import re
from urllib.parse import urlsplit

from furlong.config.destinations import is_loopback
from furlong.config.errors import Problem
from furlong.config.sections import RouterSection, RunConfig

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""Name of a header, by RFC 9110."""
_OF_POLICIES = {
    "router_session_key": ("session",),
    "router_prefix_chars": ("prefix",),
    "router_bounded_load": ("session", "prefix"),
}


def check_router(config: RunConfig) -> list[Problem]:
    """Every rule of the router's section that is broken."""
    router = config.router
    problems = [*_check_place(config), *_check_policy(router), *_check_urls(router)]
    if router.router_max_url_bytes > router.router_max_head_bytes:
        rule = f"must not be above router_max_head_bytes ({router.router_max_head_bytes}), of which it is a part"
        problems.append(Problem("router.router_max_url_bytes", router.router_max_url_bytes, rule))
    return problems


def router_host(config: RunConfig) -> str:
    """Where the router listens."""
    return config.router.router_host or config.run.host


def _check_place(config: RunConfig) -> list[Problem]:
    router, problems = config.router, []
    here = not router.router_addr
    if here and not is_loopback(router_host(config)) and not router.router_token_file:
        rule = "is no loopback address, so that everybody could register and remove workers"
        remedy = "Give --router-token-file FILE with a token that control paths then need, or --router-host 127.0.0.1."
        problems.append(Problem("router.router_host", router_host(config), rule, remedy))
    if here and bool(router.router_tls_cert) != bool(router.router_tls_key):
        missing, other = ("key", "cert") if router.router_tls_cert else ("cert", "key")
        remedy = "Give both --router-tls-cert and --router-tls-key, or neither."
        problems.append(Problem(f"router.router_tls_{missing}", "", f"must go with --router-tls-{other}", remedy))
    if router.router_addr:
        http, comma, grpc = router.router_addr.partition(",")
        if not comma or bad_base_url(http) or not re.fullmatch(r".+:\d+", grpc):
            rule = "must name both addresses"
            remedy = "For example --router-addr http://10.0.0.5:30000,10.0.0.5:30001."
            problems.append(Problem("router.router_addr", router.router_addr, rule, remedy))
    return problems


def _check_policy(router: RouterSection) -> list[Problem]:
    problems = []
    kind, _, name = router.router_session_key.partition(":")
    if kind not in ("header", "body") or not name or (kind == "header" and not _TOKEN.fullmatch(name)):
        rule, remedy = "must be header:NAME or body:KEY", "For example --router-session-key header:x-session-id."
        problems.append(Problem("router.router_session_key", router.router_session_key, rule, remedy))
    for field, policies in _OF_POLICIES.items():
        value = getattr(router, field)
        if value != RouterSection.model_fields[field].default and router.router_policy not in policies:
            rule = f"has no effect with router_policy {router.router_policy}"
            remedy = f"Give --router-policy {' or '.join(policies)}, or leave it out."
            problems.append(Problem(f"router.{field}", value, rule, remedy))
    return problems


def _check_urls(router: RouterSection) -> list[Problem]:
    problems = []
    for url in router.router_worker_urls:
        if rule := bad_base_url(url):
            shown = "(hidden)" if "@" in url else url
            problems.append(
                Problem(
                    "router.router_worker_urls", shown, rule, "For example --router-worker-urls http://10.0.0.5:30000."
                )
            )
    if len(router.router_worker_urls) > router.router_max_workers:
        rule = f"must not be more than router_max_workers ({router.router_max_workers})"
        problems.append(Problem("router.router_worker_urls", f"{len(router.router_worker_urls)} workers", rule))
    for entry in router.router_worker_allow:
        if not _is_allow(entry):
            rule, remedy = "must be HOST, HOST:PORT or a network", "For example --router-worker-allow 10.0.0.0/8."
            problems.append(Problem("router.router_worker_allow", entry, rule, remedy))
    return problems


def bad_base_url(url: str) -> str:
    """Why a text is not the base address of a server, as a rule; empty when it is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"must be a URL: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "must be http://HOST:PORT or https://HOST:PORT"
    if "@" in parts.netloc:
        return "must hold no user name or password"
    if parts.path not in ("", "/") or parts.query or parts.fragment or port == 0:
        return "must be a base address, with a port from 1 and without path, query or fragment"
    return ""


def _is_allow(entry: str) -> bool:
    if "/" not in entry:
        return bool(entry) and "@" not in entry and not any(char.isspace() for char in entry)
    try:
        ipaddress.ip_network(entry)
    except ValueError:
        return False
    return True
