"""The error that a bad configuration raises: each problem names the key, the value, the rule and the remedy."""

from dataclasses import dataclass

_SECRET_WORDS = ("key", "keys", "token", "secret", "password", "passwd", "credential", "credentials")
_NOT_SECRET = ("input", "label", "metadata", "reward", "session", "tls")
"""Words before the last that make it none: --router-session-key says where a name stands, --router-tls-key a file."""


def is_secret_name(name: str) -> bool:
    """Whether a key or flag sounds like it holds a secret; its value is then never shown."""
    words = name.lower().replace("-", "_").replace(".", "_").strip("_").split("_")
    return words[-1] in _SECRET_WORDS and (len(words) < 2 or words[-2] not in _NOT_SECRET)


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
        shown = "(hidden)" if is_secret_name(self.key) else repr(self.value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        head = self.key if self.key.startswith("--") and shown == "''" else f"{self.key} = {shown}"
        return f"{head}: {self.rule}.{' ' + self.remedy if self.remedy else ''}"


def refusal(text: str) -> str:
    """How a command or a service says that it cannot run, whatever the reason."""
    return "\n".join(["furlong: this cannot run:", *(f"  {line}" for line in text.splitlines())])


class ConfigError(Exception):
    """The configuration cannot be used; `problems` says why, all of them at once."""

    def __init__(self, problems: list[Problem], *, source: str = "") -> None:
        self.problems = problems
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__("\n".join(f"{head}{problem}" for problem in problems))
