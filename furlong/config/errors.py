"""The error that a bad configuration raises: each problem names the key, the value, the rule and the remedy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    key: str
    """Dotted key, for example `trainer.lr`."""
    value: object
    """What was given."""
    rule: str
    """What must hold, as the rest of a sentence: `must be greater than 0`."""
    remedy: str = ""
    """What to do about it, as a sentence; empty when the rule says it all."""

    def __str__(self) -> str:
        shown = repr(self.value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        return f"{self.key} = {shown}: {self.rule}.{' ' + self.remedy if self.remedy else ''}"


class ConfigError(Exception):
    """The configuration cannot be used; `problems` says why, all of them at once."""

    def __init__(self, problems: list[Problem], *, source: str = "") -> None:
        self.problems = problems
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__("\n".join(f"{head}{problem}" for problem in problems))
