"""Starts a service again when it dies, where that must not end the run: metrics, for which training never waits, and
the router, which rollout waits for.

Decides when, and when no more; says so. It neither starts nor ends a process itself, and never waits.
"""

import time
from collections.abc import Callable

from furlong.launch.child import Child
from furlong.process import ExitCode

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 10.0
STEADY_S = 10.0
"""Who has served for so long is well: its next death is followed by a short wait again."""
MAX_DEATHS = 5
"""So many in a row without serving in between, within WITHIN_S, and it is given up."""
WITHIN_S = 60.0
LAST_LINES = 10


class Keeper:
    """Looks after one service. Main thread only."""

    def __init__(
        self,
        *,
        start_again: Callable[[Child, str], None],
        say: Callable[[str], None],
        meanwhile: str,
        without: str = "",
    ) -> None:
        """start_again: given the dead child and how it ended; may raise OSError.

        meanwhile: what happens until it is back, as a sentence. without: what happens once it is given up; empty: the
        run ends, since it cannot go on.
        """
        self.given_up = ""
        """Why it is not started again. Empty: it is."""
        self.refused_start = False
        """It was given up before it had ever served, and before training had begun."""
        self._start_again, self._say = start_again, say
        self._meanwhile, self._without = meanwhile, without
        self._seen_dead: Child | None = None
        self._due_at = 0.0
        self._wait_s = FIRST_WAIT_S
        self._serves_since: float | None = None
        self._ever_served = False
        self._deaths: list[float] = []

    @property
    def ends_run(self) -> bool:
        """Whether the run must end for it."""
        return self.refused_start or bool(self.given_up and not self._without)

    def serves(self) -> None:
        """It has said SERVING."""
        self._serves_since = time.monotonic()
        self._ever_served = True
        self._deaths.clear()

    def look(self, child: Child, *, others_start: bool, at_once: bool = False) -> None:
        """If it is dead, start it again when that is due. others_start: training has not begun.

        at_once: without a wait, as the run is being closed.
        """
        if child.exit_code() is None or self.given_up:
            return
        if child is not self._seen_dead:
            self._take_death(child, others_start=others_start, at_once=at_once)
        elif at_once or time.monotonic() >= self._due_at:
            try:
                self._start_again(child, child.describe_end())
            except OSError as error:
                self._deaths.append(time.monotonic())
                if not self._without and len(self._deaths) >= MAX_DEATHS:
                    self._give_up(child, f"cannot be started ({error})", refused=False)
                    return
                self._delay()
                self._say(f"{child.plan.instance} cannot be started ({error}); again in {self._wait_s:g} s")

    def _take_death(self, child: Child, *, others_start: bool, at_once: bool) -> None:
        now = time.monotonic()
        if self._serves_since is not None and now - self._serves_since >= STEADY_S:
            self._wait_s = FIRST_WAIT_S
        if self._serves_since is None:
            self._deaths.append(now)
        self._serves_since = None
        self._seen_dead = child
        name, ended = child.plan.instance, child.describe_end()
        recent = [at for at in self._deaths if now - at <= WITHIN_S]
        if child.exit_code() == ExitCode.BAD_CONFIG or len(recent) >= MAX_DEATHS:
            self._give_up(child, ended, refused=others_start and not self._ever_served)
            return
        when = "now" if at_once else f"in {self._wait_s:g} s"
        self._say(f"{name} {ended}; starting it again {when}. {self._meanwhile}")
        self._delay()

    def _delay(self) -> None:
        self._due_at = time.monotonic() + self._wait_s
        self._wait_s = min(MAX_WAIT_S, 2 * self._wait_s)

    def _give_up(self, child: Child, ended: str, *, refused: bool) -> None:
        times = f" {len(self._deaths)} times in a row" if len(self._deaths) > 1 else ""
        self.given_up, self.refused_start = f"{child.plan.instance} {ended}{times}", refused
        if self.ends_run:  # told as the reason why
            return
        lines = "".join(f"\n    {line}" for line in child.last_lines(LAST_LINES)) or " nothing"
        self._say(
            f"{self.given_up} and is not started again. {self._without} Its last output ({child.output_path}):{lines}"
        )
