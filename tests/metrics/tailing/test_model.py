"""Whatever happens to a log and to the service, in any order: each line once. The store and the clock are ours."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.metrics.tailing.fake_store import Hand


class Log(RuleBasedStateMachine):
    """A program writes numbered lines to app.log, which is rotated, cut and killed at; the glob takes all its names."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "app.log"
        self.hand = Hand(Path(self.folder.name) / "app.log*")
        self.written: list[str] = []
        self.half = ""
        self.halves: dict[str, str] = {}
        self.may_be_lost: set[str] = set()
        self.unread: list[str] = []
        self.num_rotations = 0

    def teardown(self) -> None:
        self.hand.look(pass_s=1.0)
        self.hand.look(pass_s=60.0)
        self.hand.look(pass_s=60.0)
        self.hand.finish()
        got = self.texts()
        expected = [*self.written, *([self.half] if self.half else [])]
        assert len(got) == len(set(got)), f"twice: {sorted(got)}"
        assert set(got) <= set(expected) | self.may_be_lost | set(self.halves)
        assert not [half for half, whole in self.halves.items() if half in got and whole in got], "half and whole"
        assert set(expected) - set(got) <= self.may_be_lost, "lost"
        self.folder.cleanup()

    def texts(self) -> list[str]:
        """What came; a half line and the rest of it that came later are one."""
        texts: list[str] = []
        for record in self.hand.store.records:
            if record.get("continued"):
                begun = [at for at, text in enumerate(texts) if self.halves.get(text) == text + record["text"]]
                assert begun, f"the rest of nothing: {record['text']}"
                texts[begun[0]] += record["text"]
            else:
                texts.append(record["text"])
        return texts

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    @rule(count=st.integers(1, 5), size=st.sampled_from([0, 30, 300]))
    def append(self, count: int, size: int) -> None:
        for _ in range(count):
            self.end_half()
            line = f"line {len(self.written)} {'x' * size}".rstrip()
            self.write(line + "\n")
            self.written.append(line)
            self.unread.append(line)

    @precondition(lambda self: not self.half)
    @rule()
    def append_half(self) -> None:
        self.half = f"line {len(self.written)} half"
        self.write(self.half)

    def end_half(self) -> None:
        if self.half:
            rest = f" and whole {len(self.written)}"
            self.write(rest + "\n")
            self.written.append(self.half + rest)
            self.halves[self.half] = self.written[-1]
            self.unread.append(self.written[-1])
            self.half = ""

    @rule()
    def look(self) -> None:
        self.hand.look()
        self.unread.clear()

    @rule()
    def look_at_known_files(self) -> None:
        self.hand.look(discover=False)

    @rule()
    def look_after_a_silence(self) -> None:
        self.hand.look(pass_s=6.0)
        self.hand.look()
        self.unread.clear()

    @rule()
    def stop_and_start(self) -> None:
        self.hand.finish()
        self.hand.start()

    @rule()
    def kill(self) -> None:
        self.hand.kill()

    @precondition(lambda self: self.path.exists())
    @rule()
    def rotate_by_rename(self) -> None:
        self.end_half()
        self.shift()
        self.path.rename(f"{self.path}.1")

    @precondition(lambda self: self.path.exists() and self.path.stat().st_size > 0)
    @rule(looks=st.booleans())
    def rotate_by_copy_and_cut(self, looks: bool) -> None:
        self.end_half()
        self.shift()
        Path(f"{self.path}.1").write_bytes(self.path.read_bytes())
        if looks:
            self.hand.look()
        os.truncate(self.path, 0)
        self.hand.look(discover=False)

    @precondition(lambda self: self.path.exists() and self.path.stat().st_size > 0)
    @rule(grows=st.booleans())
    def cut(self, grows: bool) -> None:
        """What was not read before is gone with the file; what was read stays."""
        self.end_half()
        self.may_be_lost |= set(self.unread)
        self.unread.clear()
        before = self.path.stat().st_size
        os.truncate(self.path, 0)
        while grows and self.path.stat().st_size <= before:
            self.append(1, 300)

    @precondition(lambda self: self.path.exists())
    @rule()
    def remove(self) -> None:
        self.end_half()
        self.may_be_lost |= set(self.unread)
        self.unread.clear()
        self.path.unlink()

    def shift(self) -> None:
        for number in range(60, 0, -1):
            old = Path(f"{self.path}.{number}")
            if old.exists():
                old.rename(f"{self.path}.{number + 1}")

    @invariant()
    def nothing_comes_twice(self) -> None:
        texts = self.texts()
        assert len(texts) == len(set(texts))


Log.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestLog = pytest.mark.timeout(60)(Log.TestCase)
