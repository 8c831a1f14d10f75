"""Certificates: what the router shows to clients, and whom it trusts as a worker."""

import functools
import ssl


def serving_context(cert: str, key: str) -> ssl.SSLContext:
    """For serving HTTPS. cert: PEM file with the whole chain; key: PEM file. Raises OSError, ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key)
    return context


@functools.cache
def worker_context(ca: str) -> ssl.SSLContext:
    """For https workers: their certificate must be signed by one in this PEM file, and name their host. Read once.

    ca: empty: the system's authorities. Raises OSError, ssl.SSLError.
    """
    context = ssl.create_default_context(cafile=ca or None)
    context.set_alpn_protocols(["http/1.1"])
    return context
