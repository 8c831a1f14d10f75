"""What a request path is for the router: answered by itself, an engine's admin path, or to be passed on. Pure.

Law 6: an engine's admin calls change what every request gets, are meant for each engine in its own turn, and some run
code from their body. They need the router's token, and without one are refused; the rollout service makes them on the
engines directly.
"""

import enum
import functools
from urllib.parse import unquote

OWN = frozenset(
    (
        "/add_worker",
        "/healthz",
        "/list_workers",
        "/liveness",
        "/metrics",
        "/readyz",
        "/remove_worker",
        "/workers",
    )
)
"""Paths of the router itself."""
OWN_FOLDERS = ("/workers/", "/router/")
ALIVE = frozenset(("/healthz", "/liveness"))
"""The process answers; the second is sgl-router's word, and stands in the probes of deployments."""
READINESS = frozenset(("/health", "/health_generate", "/readiness", "/ready"))
"""Answered like /readyz, though they are paths of the engines, or sgl-router's: one engine's health says nothing of the
router's."""
ABORT = "/abort_request"
FAN_OUT = frozenset(
    (
        ABORT,
        "/engine_metrics",
        "/flush_cache",
        "/get_load",
        "/get_loads",
        "/v1/loads",
        "/v1/models",
    )
)
"""Paths that mean all workers."""
NEED_NO_TOKEN = READINESS | (FAN_OUT - {"/flush_cache"}) | ALIVE | {"/metrics", "/readyz", "/router/openapi.json"}
"""Of those that the router answers. An abort of everything needs it all the same."""
TELL_KEYS = frozenset(("/get_server_info", "/server_info"))
"""Where engines show how they were started, their keys among it: whoever asks for that needs a key of his own."""
MAX_UNQUOTES = 3

_ADMIN_NAMES = frozenset(
    (
        "clear_hicache_storage_backend",
        "collective_rpc",
        "configure_logging",
        "freeze_gc",
        "is_scaling_elastic_ep",
        "list_external_corpora",
        "pause",
        "pd_role_switch",
        "register_transfer_engine_info",
        "resume",
        "shutdown",
        "sleep",
        "slow_down",
        "wake_up",
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
    "flush_",
    "get_remote_instance",
    "get_weights",
    "hicache",
    "init_weight",
    "load_lora",
    "pause_generation",
    "pull_weight",
    "release_memory",
    "remote_instance",
    "remove_external_corpus",
    "reset_",
    "resume_memory",
    "scale_elastic",
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
    """Answered by the control surface, which may ask workers."""
    ADMIN = "admin"
    """Handed to one or all workers by the control surface, with the token; else refused."""
    PASS = "pass"
    """Passed to one worker."""


@functools.lru_cache(maxsize=256)
def kind_of(path: str) -> PathKind:
    """What a path is for. path: without query, as sent or decoded."""
    if path.startswith(OWN_FOLDERS):
        return PathKind.CONTROL
    plain = plain_path(path)
    if plain in OWN or plain in READINESS or plain in FAN_OUT or plain.startswith(OWN_FOLDERS):
        return PathKind.CONTROL
    parts = plain.split("/")
    first = parts[2] if parts[1] == "v1" and len(parts) > 2 else parts[1]
    if "%" in plain or first in _ADMIN_NAMES or first.startswith(_ADMIN_PREFIXES):
        return PathKind.ADMIN
    return PathKind.PASS


@functools.lru_cache(maxsize=256)
def lends_key(path: str) -> bool:
    """Whether a worker's own key goes with a request that somebody without one sent."""
    return plain_path(path) not in TELL_KEYS


def plain_path(path: str) -> str:
    """The path as the most lenient of servers might read it: escapes undone, empty and dot parts resolved, lower case.

    An escape that is left after undoing them so often was put there to hide something.
    """
    for _ in range(MAX_UNQUOTES):
        path = unquote(path)
    parts: list[str] = []
    for piece in path.replace("\\", "/").split("/"):
        part = piece.split(";")[0].strip().strip("\0").lower()
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)
