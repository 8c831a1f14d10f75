"""What `furlong up` shows, with a reader that is slow, gone, or was never there."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from furlong.launch.console import Console


def test_reader_that_is_slow_gets_whole_lines_from_a_non_blocking_terminal() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    console = Console(writer)
    for number in range(100):
        console.line(f"{number}".ljust(4095, "."))  # 400 KiB: the pipe is full in between
    threading.Thread(target=lambda: (console.flush(10.0), os.close(writer))).start()
    with open(reader, "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    assert [int(line.rstrip(b".")) for line in lines] == list(range(100)) and console.num_dropped == 0


def test_lines_beyond_what_an_unread_pipe_holds_are_dropped_and_counted() -> None:
    reader, writer = os.pipe()
    console = Console(writer, max_lines=10)
    for _ in range(100):
        console.line("x" * 65536)
    assert not console.flush(0.05) and console.num_dropped >= 85
    os.close(reader)  # frees the thread


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", "| true"])
def test_process_with_nobody_to_show_anything_to_goes_on_and_counts(tmp_path: Path, redirect: str) -> None:
    program = """
import sys
other = open(sys.argv[1], "w")
from furlong.launch.console import Console
console = Console(1)
for _ in range(2000):
    console.line("row" * 100)
console.flush(5.0)
other.write(f"{console.num_dropped}")
other.close()
"""
    path = tmp_path / "other"
    command = f'"{sys.executable}" -c "$PROGRAM" "{path}" {redirect}'
    subprocess.run(["bash", "-c", command], env={**os.environ, "PROGRAM": program}, timeout=30, check=False)
    assert 0 < int(path.read_text()) <= 2000
