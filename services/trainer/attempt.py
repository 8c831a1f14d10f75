"""Which attempt at a run this is: a number in the run directory, one more at each start of the trainer."""

from furlong.rundir import RunDir, write_atomically

FILE = "attempt"


def read_attempt(run_dir: RunDir) -> int:
    """The number of the last start; 0: none yet, or the file holds no number."""
    try:
        text = (run_dir.root / FILE).read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() else 0


def next_attempt(run_dir: RunDir) -> int:
    """Count this start; its number, from 1. Rank 0 alone calls it."""
    attempt = read_attempt(run_dir) + 1
    write_atomically(run_dir.root / FILE, f"{attempt}\n".encode())
    return attempt
