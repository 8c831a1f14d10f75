"""Files that the router is told of and cannot work without: token, certificates. Reads; changes nothing."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import structlog

from furlong.config import RunConfig
from furlong.config.errors import Problem

log = structlog.get_logger()

MAX_TOKEN_BYTES = 4096


def bad_router_files(config: RunConfig) -> list[Problem]:
    """What of them cannot be used, each with why."""
    router = config.router
    problems = list(_bad_token(router.router_token_file)) if router.router_token_file else []
    if router.router_addr:
        if router.router_tls_cert:
            problems += _bad_ca("router.router_tls_cert", router.router_tls_cert)
        return problems
    if router.router_tls_cert and router.router_tls_key:
        problems += _bad_pair(router.router_tls_cert, router.router_tls_key)
    if router.router_worker_ca:
        problems += _bad_ca("router.router_worker_ca", router.router_worker_ca)
    return problems


def read_token(path: str) -> str:
    """The token of a file. Raises OSError, ValueError."""
    content = Path(path).read_bytes()
    if len(content) > MAX_TOKEN_BYTES:
        raise ValueError(f"it has more than {MAX_TOKEN_BYTES} bytes")
    token = content.decode("ascii").strip()
    if not token or any(char <= " " or char == "\x7f" for char in token):
        raise ValueError("it must hold one token: visible ASCII characters without spaces")
    return token


def token_metadata(path: str) -> tuple[tuple[str, str], ...]:
    """What a gRPC call to the router carries; nothing without a token file, or when it cannot be read."""
    if not path:
        return ()
    try:
        return (("authorization", f"Bearer {read_token(path)}"),)
    except (OSError, ValueError) as error:
        log.warning("router_token_unreadable", path=path, error=_words(error))
        return ()


def router_tls(config: RunConfig) -> ssl.SSLContext:
    """How a client checks an https router: by --router-tls-cert alone, else by the system's authorities.

    A router of the run directory has that very certificate, whose name need not be that of its address.
    """
    router = config.router
    context = ssl.create_default_context(cafile=router.router_tls_cert or None)
    if router.router_tls_cert:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it may be signed by another that is not at hand
        context.check_hostname = bool(router.router_addr)
    return context


def _bad_token(path: str) -> Iterator[Problem]:
    try:
        read_token(path)
    except (OSError, ValueError) as error:
        remedy = "For example: head -c 24 /dev/urandom | base64 > FILE; chmod 600 FILE."
        yield Problem("router.router_token_file", path, f"must be a file with a token: {_words(error)}", remedy)


def _bad_pair(cert: str, key: str) -> Iterator[Problem]:
    for name, path in (("cert", cert), ("key", key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            yield Problem(f"router.router_tls_{name}", path, f"must be a readable file: {_words(error)}")
            return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        rule = f"must be a certificate and its private key, both PEM, the key without a password: {_words(error)}"
        yield Problem("router.router_tls_cert", cert, rule, f"The key is {key}.")


def _bad_ca(key: str, path: str) -> Iterator[Problem]:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError as error:  # of ssl too
        yield Problem(key, path, f"must be a file of certificates (PEM): {_words(error)}")


def _words(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it must be ASCII"
    return getattr(error, "strerror", None) or str(error)
