"""When a rule begins and ceases to fire: after k bad observations, until m good ones, then quiet for a while. Pure."""

from dataclasses import dataclass


@dataclass
class Hysteresis:
    """One rule in one run."""

    after: int
    resolve: int
    cool_down: int
    firing: bool = False
    num_bad: int = 0
    """Bad observations in a row."""
    num_good: int = 0
    """Good observations in a row."""
    quiet_left: int = 0
    """Observations that are left of the cool-down."""

    def see(self, *, bad: bool, certain: bool = False) -> bool:
        """Take an observation; whether `firing` changed. certain: one is enough."""
        self.quiet_left = max(0, self.quiet_left - 1)
        self.num_bad = self.num_bad + 1 if bad else 0
        self.num_good = 0 if bad else self.num_good + 1
        if self.firing and self.num_good >= self.resolve:
            self.firing, self.quiet_left = False, self.cool_down
            return True
        if not self.firing and bad and not self.quiet_left and (certain or self.num_bad >= self.after):
            self.firing = True
            return True
        return False

    def begin_anew(self) -> None:
        """Forget what was counted; nothing fires."""
        self.firing = False
        self.num_bad = self.num_good = self.quiet_left = 0
