"""What the router is told, in its own words. Made from the run's configuration in one place."""

from dataclasses import dataclass, fields
from typing import Literal

from furlong.config import RunConfig

Policy = Literal["least-in-flight", "round-robin", "power-of-two", "session", "prefix"]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Limits and intervals; meanings and defaults stand in furlong.config.sections.RouterSection, `router_` before."""

    worker_urls: tuple[str, ...] = ()
    processes: int = 1
    require_policy_version: bool = True
    policy: Policy = "least-in-flight"
    session_key: str = "header:x-session-id"
    prefix_chars: int = 256
    bounded_load: float = 1.25
    max_in_flight: int = 0
    max_queued: int
    queue_timeout_s: float
    max_tries: int
    connect_timeout_s: float
    first_byte_timeout_s: float
    idle_timeout_s: float
    total_timeout_s: float
    client_head_timeout_s: float
    client_keep_alive_s: float
    max_connections: int
    max_head_bytes: int
    max_url_bytes: int
    max_body_bytes: int
    health_interval_s: float
    health_timeout_s: float
    health_fail_threshold: int
    health_success_threshold: int
    health_busy_grace_s: float
    breaker_failures: int
    breaker_pause_s: float
    max_workers: int
    worker_allow: tuple[str, ...] = ()
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    worker_ca: str = ""
    access_log_every: int = 1000
    idle_connection_s: float = 1.0
    """Seconds that an unused connection is kept: well below the 5 s after which SGLang's server closes one."""
    max_control_body_bytes: int = 2 * 1024 * 1024
    """Largest body that the router itself reads."""

    @classmethod
    def of(cls, config: RunConfig) -> "RouterSettings":
        """From the run's configuration."""
        section = config.router
        told = {field.name: f"router_{field.name}" for field in fields(cls)}
        return cls(**{name: getattr(section, key) for name, key in told.items() if hasattr(section, key)})
