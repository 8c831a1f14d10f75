"""What a request path is for the router: its own, refused, or to be passed on. Pure.

Law 6: an engine's admin calls never go through here. They change what every request gets, are meant for each engine in
its own turn, and some run code from their body. Rollout makes them on the engines directly.
"""

import enum
import functools
from urllib.parse import unquote

CONTROL = frozenset(("/workers", "/add_worker", "/remove_worker", "/list_workers", "/healthz", "/readyz"))
CONTROL_FOLDERS = ("/workers/", "/router/")
READINESS = frozenset(("/health", "/health_generate", "/ready"))
ABORT = "/abort_request"
MAX_UNQUOTES = 3

_ADMIN_NAMES = frozenset(
    (
        "clear_hicache_storage_backend",
        "configure_logging",
        "flush_cache",
        "freeze_gc",
        "pd_role_switch",
        "slow_down",
        "weights_checker",
    )
)
_ADMIN_PREFIXES = (
    "add_external_corpus",
    "attach_hicache",
    "begin_weight",
    "continue_generation",
    "destroy_weight",
    "detach_hicache",
    "dump_",
    "dumper",
    "end_weight",
    "get_remote_instance",
    "get_weight",
    "hicache",
    "init_weight",
    "load_lora",
    "pause_generation",
    "release_memory",
    "remote_instance",
    "remove_external_corpus",
    "resume_memory",
    "send_weight",
    "set_",
    "start_expert",
    "start_profile",
    "stop_expert",
    "stop_profile",
    "unload_lora",
    "update_weight",
)


class PathKind(enum.Enum):
    """What happens with a request."""

    CONTROL = "control"
    """Answered by the control surface."""
    READINESS = "readiness"
    """Answered like /readyz, though it is a path of the engines: one engine's health says nothing of the router's."""
    ABORT = "abort"
    """Sent to all workers, since any may own the request."""
    ADMIN = "admin"
    """Refused."""
    PASS = "pass"
    """Passed to one worker."""


@functools.lru_cache(maxsize=256)
def kind_of(path: str) -> PathKind:
    """What a path is for. path: without query, as sent or decoded."""
    if path in CONTROL or path.startswith(CONTROL_FOLDERS):
        return PathKind.CONTROL
    plain = plain_path(path)
    if plain in READINESS:
        return PathKind.READINESS
    if plain == ABORT:
        return PathKind.ABORT
    first = plain.split("/")[1]
    if "%" in plain or first in _ADMIN_NAMES or first.startswith(_ADMIN_PREFIXES):
        return PathKind.ADMIN
    return PathKind.PASS


def plain_path(path: str) -> str:
    """The path as the most lenient of servers might read it: escapes undone, empty and dot parts resolved, lower case.

    An escape that is left after undoing them so often was put there to hide something.
    """
    for _ in range(MAX_UNQUOTES):
        path = unquote(path)
    parts: list[str] = []
    for part in path.replace("\\", "/").split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part.split(";")[0].strip().lower())
    return "/" + "/".join(parts)
