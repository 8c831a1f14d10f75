"""What the router is told, in its own words. Made from the run's configuration in one place."""

from dataclasses import dataclass

from furlong.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Limits and intervals; meanings and defaults stand in furlong.config.sections.RouterSection."""

    health_interval_s: float
    health_timeout_s: float
    fail_threshold: int
    success_threshold: int
    busy_grace_s: float
    connect_timeout_s: float
    first_byte_timeout_s: float
    queue_timeout_s: float
    max_queued: int
    max_workers: int
    allow_workers: tuple[str, ...] = ()
    failing_pause_s: float = 2.0
    """Seconds between requests that a worker gets which only answers errors."""
    idle_connection_s: float = 1.0
    """Seconds that an unused connection is kept: well below the 5 s after which SGLang's server closes one."""
    max_head_bytes: int = 64 * 1024
    """Largest request head, and largest head of an answer."""
    max_control_body_bytes: int = 16 * 1024
    """Largest body that the router itself reads."""

    @classmethod
    def of(cls, config: RunConfig) -> "RouterSettings":
        """From the run's configuration."""
        router = config.router
        return cls(
            health_interval_s=router.router_health_interval_s,
            health_timeout_s=router.router_health_timeout_s,
            fail_threshold=router.router_health_fail_threshold,
            success_threshold=router.router_health_success_threshold,
            busy_grace_s=router.router_health_busy_grace_s,
            connect_timeout_s=router.router_connect_timeout_s,
            first_byte_timeout_s=router.router_first_byte_timeout_s,
            queue_timeout_s=router.router_queue_timeout_s,
            max_queued=router.router_max_queued,
            max_workers=router.router_max_workers,
            allow_workers=router.router_allow_workers,
        )
