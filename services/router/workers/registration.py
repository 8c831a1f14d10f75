"""What may be said of a worker when it is registered, beside its address. Pure checks.

The limits keep what clients send out of places where it could do harm: labels are compared with a header's, the key is
sent as a header, all of it is written to the state file.
"""

from collections.abc import Mapping

from services.router.workers.urls import BadWorker

MAX_LABELS = 64
MAX_CHARS = 256
MAX_KEY_CHARS = 4096
MAX_PRIORITY = 2**31 - 1


def check_registration(worker_type: object, labels: object, priority: object, api_key: object) -> None:
    """Raises BadWorker, which never repeats the key."""
    if not isinstance(worker_type, str) or not 0 < len(worker_type) <= 64 or not _visible(worker_type):
        raise BadWorker(
            f"worker_type must be 1 to 64 visible ASCII characters, such as 'regular'; got {worker_type!r:.80}"
        )
    if not isinstance(labels, Mapping) or len(labels) > MAX_LABELS:
        raise BadWorker(f"labels must be an object of at most {MAX_LABELS} strings, such as {{'pool': 'eval'}}")
    for key, value in labels.items():
        if not _is_label(key) or not _is_label(value):
            raise BadWorker(
                f"labels: {key!r:.80} = {value!r:.80}: both must be strings of 1 to {MAX_CHARS} visible ASCII "
                "characters without ',' and '='"
            )
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise BadWorker(f"priority must be a whole number, higher first, such as 50; got {priority!r:.80}")
    if api_key is not None and not (
        isinstance(api_key, str) and 0 < len(api_key) <= MAX_KEY_CHARS and _visible(api_key)
    ):
        raise BadWorker(f"api_key must be 1 to {MAX_KEY_CHARS} visible ASCII characters, or left out")


def _is_label(value: object) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_CHARS
        and _visible(value)
        and "," not in value
        and "=" not in value
    )


def _visible(text: str) -> bool:
    return all("!" <= char <= "~" for char in text)
