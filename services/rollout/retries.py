"""When a failed generation is asked for again, and after how long. Pure.

Only what may go better the next time is repeated: connection errors, 408, 429 and 5xx. Repeating is safe, since the
seeds stay the same and a prompt's samples are made anew.
"""

import random
from dataclasses import dataclass

RETRIED = frozenset({408, 425, 429})
MAX_RETRY_AFTER_S = 10.0


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how slowly."""

    max_attempts: int = 6
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0

    def delay_s(self, attempt: int, *, status: int | None, retry_after: str | None = None) -> float | None:
        """Seconds to wait after failed attempt number `attempt` (from 1). None: give up.

        status: HTTP status, None for a connection error. retry_after: that header's value.
        """
        if attempt >= self.max_attempts or (status is not None and not is_transient(status)):
            return None
        delay = min(self.max_delay_s, self.first_delay_s * 2 ** (attempt - 1)) * random.uniform(0.75, 1.25)
        try:
            asked = float(retry_after) if retry_after else 0.0
        except ValueError:
            asked = 0.0
        return max(delay, min(asked, MAX_RETRY_AFTER_S))


def is_transient(status: int) -> bool:
    """Whether an HTTP status may be another the next time."""
    return status in RETRIED or status >= 500
