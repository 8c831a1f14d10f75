"""One folder of event files: one continuous curve, whatever comes late, goes back or is killed."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from services.metrics.sinks.tensorboard_events import Place, values_of
from services.metrics.sinks.tensorboard_folder import AxisFolder
from services.metrics.sinks.tensorboard_process import axis_folder, folder_name
from tests.metrics.sinks.event_files import Curves, by_rule, by_tensorboard

Read = Callable[[Path], Curves]


@pytest.fixture(params=[by_rule, pytest.param(by_tensorboard, marks=pytest.mark.tools)])
def read(request: pytest.FixtureRequest) -> Read:
    return request.param


class Writing:
    """Adds rows to a folder, numbering them."""

    def __init__(self, root: Path) -> None:
        self.root, self.row_id = root, 0
        self.folder = AxisFolder(root / "r")

    def add(self, step: int, attempt: int = 1, **values: float) -> None:
        self.row_id += 1
        self.again(self.row_id, step, attempt, values or {"loss": float(step + 1000 * attempt)})

    def again(self, row_id: int, step: int, attempt: int, values: Mapping[str, float]) -> None:
        row = {"values": values, "histograms": {}, "tables": {}}
        self.folder.add(Place(row_id, attempt, step, 1.0 * row_id), values_of(row))

    def restart(self) -> None:
        """As after a kill: what stands in the files is all that is known."""
        self.folder.close()
        self.folder = AxisFolder(self.root / "r")


@pytest.fixture
def writing(tmp_path: Path) -> Writing:
    return Writing(tmp_path)


def test_resume_behind_the_last_step_leaves_one_curve(writing: Writing, read: Read) -> None:
    for step in range(151):
        writing.add(step)
    writing.restart()
    for step in range(100, 201):
        writing.add(step, attempt=2)
    expected = [(s, 1000.0 + s) for s in range(100)] + [(s, 2000.0 + s) for s in range(100, 201)]
    assert read(writing.root) == {"r/loss": expected}


def test_rows_that_are_in_the_files_are_not_written_again(writing: Writing, read: Read) -> None:
    for step in range(5):
        writing.add(step)
    writing.restart()
    for row_id in range(1, 7):
        writing.again(row_id, row_id - 1, 1, {"loss": 1.0 * row_id})
    assert read(writing.root) == {"r/loss": [(0, 1000), (1, 1001), (2, 1002), (3, 1003), (4, 1004), (5, 6)]}


def test_late_key_reaches_its_step_and_no_value_is_doubled(writing: Writing, read: Read) -> None:
    writing.add(1, a=1)
    writing.add(2, a=2, late=20)
    writing.add(1, late=10)  # behind what the tag has reached
    writing.add(3, a=3)
    writing.add(3, new=30)  # beside it
    writing.add(3, a=3.5)  # a correction
    assert read(writing.root) == {
        "r/a": [(1, 1), (2, 2), (3, 3.5)],
        "r/late": [(1, 10), (2, 20)],
        "r/new": [(3, 30)],
    }


def test_resumed_steps_that_come_out_of_order_take_all_of_the_older_attempt_away(writing: Writing, read: Read) -> None:
    for step in range(1, 6):
        writing.add(step)
    writing.add(4, attempt=2)
    writing.add(3, attempt=2)
    writing.add(2)  # a late row of attempt 1, before where attempt 2 began
    assert read(writing.root) == {"r/loss": [(1, 1001), (2, 1002), (3, 2003), (4, 2004)]}


def test_amendment_far_behind_reads_the_files(writing: Writing, read: Read) -> None:
    for step in range(1000):
        writing.add(step)
    writing.add(10, loss=-1, late=5)
    expected = [(step, -1.0 if step == 10 else 1000.0 + step) for step in range(1000)]
    assert read(writing.root) == {"r/loss": expected, "r/late": [(10, 5)]}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_purge_that_a_kill_cut_short_is_made_good(writing: Writing, share: float, read: Read) -> None:
    for step in range(20):
        writing.add(step)
    path = next(writing.root.rglob("*tfevents*"))
    before = path.stat().st_size
    writing.add(5, loss=-1)
    with path.open("r+b") as file:
        file.truncate(before + int((path.stat().st_size - before) * share))
    writing.restart()
    assert read(writing.root) == {"r/loss": [(step, 1000.0 + step) for step in range(20)]}
    writing.again(21, 5, 1, {"loss": -1})
    assert read(writing.root)["r/loss"][4:7] == [(4, 1004), (5, -1), (6, 1006)]


def test_record_that_is_cut_is_written_again(writing: Writing, read: Read) -> None:
    writing.add(1)
    writing.add(2)
    path = next(writing.root.rglob("*tfevents*"))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)
    writing.restart()
    assert writing.folder.through == 1
    writing.again(2, 2, 1, {"loss": 2})
    assert read(writing.root) == {"r/loss": [(1, 1001), (2, 2)]}


def test_files_of_others_in_the_folder_are_left_alone(writing: Writing) -> None:
    writing.add(1)
    other = writing.root / "r" / "events.out.tfevents.1.host.other"
    other.write_bytes(b"theirs")
    writing.restart()
    writing.add(1, attempt=2)
    assert other.read_bytes() == b"theirs"


def test_numbers_that_are_not_finite_stay_so(writing: Writing, read: Read) -> None:
    writing.add(1, a=math.nan, b=math.inf, c=-math.inf)
    found = read(writing.root)
    assert math.isnan(found["r/a"][0][1])
    assert (found["r/b"], found["r/c"]) == ([(1, math.inf)], [(1, -math.inf)])


def test_folders_of_two_runs_or_axes_are_never_one() -> None:
    runs = ["a", "A", "a/b", "a%2Fb", "..", ".", "", "ä", ".a", "%2Ea", "a b"]
    assert len({folder_name(run) for run in runs}) == len(runs)
    assert not [name for name in map(folder_name, runs) if "/" in name or name.startswith(".") or not name]
    axes = ["train/step", "train", "train/time", "train.time", "train/time/x", "engine/time", "a.b/step", "a/b"]
    assert len({axis_folder(axis) for axis in axes}) == len(axes)
    assert axis_folder("train/step") == "train"
