"""What one request wants of a worker. A value; the front makes it from the request, the choice reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Want:
    """What one request wants of a worker; empty fields want nothing."""

    session: bytes = b""
    """All requests of one session go to the same worker while they can."""
    prefix: bytes = b""
    """How the prompt begins; prompts that begin alike go to the same worker while they can."""
    labels: frozenset[tuple[str, str]] = frozenset()
    """The worker must have all of them."""

    @property
    def shown_labels(self) -> str:
        """As the header of a request has them."""
        return ",".join(sorted(f"{key}={value}" for key, value in self.labels))


ANY = Want()
"""Any worker will do."""
