"""What holds for every test: a quiet, offline, single-threaded environment, and no process left behind.

Test modules of one folder share code as `from tests.FOLDER.NAME import ...`: the repository is importable.
"""

import os
import signal
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

MARK = "FURLONG_TEST_RUN"
END_LIMIT_S = 10.0
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}
LEFT_BEHIND = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module, and with it torch, is imported."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of tests would inherit that
    os.environ.update(SETTINGS)
    os.environ[MARK] = uuid.uuid4().hex  # inherited by every process of this test run, orphans too
    for name in ("WANDB_API_KEY", "WANDB_API_KEY_FILE", "WANDB_SERVICE"):
        os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """A run that leaves processes behind has failed; they are ended."""
    yield
    left = _left_behind()
    if left:
        session.config.stash[LEFT_BEHIND] = [f"{p.pid}: {' '.join(_command(p))[:200]}" for p in left]
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for process in left:
            process.kill()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name them."""
    left = config.stash.get(LEFT_BEHIND, [])
    if left:
        terminalreporter.section("processes left behind: this run has failed", sep="=", red=True)
        for line in left:
            terminalreporter.line(line)


def _left_behind() -> list[psutil.Process]:
    """Processes of this test run that still run after a moment to end in."""
    deadline = time.monotonic() + END_LIMIT_S
    while (found := [p for p in psutil.process_iter() if _is_ours(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _is_ours(process: psutil.Process) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
