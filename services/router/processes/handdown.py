"""What the primary hands down to a secondary: descriptors by number, and in the first frame what it is to do. Pure."""

from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from services.router.processes.frames import Frame
from services.router.settings import RouterSettings


@dataclass(frozen=True)
class Descriptors:
    """Open files that are inherited."""

    link: int
    door: int
    memory: int
    wakers: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "Descriptors":
        """From the command line."""
        link, door, memory, *wakers = map(int, text.split(","))
        return cls(link, door, memory, tuple(wakers))

    @property
    def all(self) -> tuple[int, ...]:
        """For whoever starts the process."""
        return (self.link, self.door, self.memory, *self.wakers)

    def __str__(self) -> str:
        return ",".join(map(str, self.all))


@dataclass(frozen=True)
class Logging:
    """Where a secondary's log goes."""

    config: str
    """The run's configuration as JSON."""
    foreground: bool
    """Also to stderr."""
    ships: bool
    """Also to the metrics service."""


@dataclass(frozen=True)
class Hello:
    """The first frame."""

    settings: RouterSettings
    column: int
    drain_s: float
    logging: Logging | None
    """None: warnings to stderr."""

    def frame(self) -> Frame:
        """As it is sent."""
        logging = None if self.logging is None else asdict(self.logging)
        return {
            "settings": asdict(self.settings),
            "column": self.column,
            "drain_s": self.drain_s,
            "logging": logging,
        }

    @classmethod
    def of(cls, frame: Frame) -> "Hello":
        """As it came."""
        settings = TypeAdapter(RouterSettings).validate_python(frame["settings"])
        logging = None if frame["logging"] is None else Logging(**frame["logging"])
        return cls(settings, frame["column"], frame["drain_s"], logging)
