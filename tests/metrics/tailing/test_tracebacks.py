"""A traceback is one record, whole, however its lines come; nothing else is drawn into it."""

import subprocess
import sys

import pytest

from services.metrics.tailing.tracebacks import MAX_BYTES, MAX_LINES
from tests.metrics.tailing.test_lines import read, texts

CHAINED = """
try:
    {}["a"]
except KeyError as error:
    raise ValueError("two\\n  lines") from error
"""
GROUP = """
def fail(error): raise error
def caught(error):
    try: fail(error)
    except Exception as raised: return raised
raise ExceptionGroup("several", [caught(KeyError("k")), ExceptionGroup("inner", [caught(OSError(2, "x"))])])
"""
DURING = "try:\n    1/0\nexcept ZeroDivisionError:\n    raise KeyboardInterrupt\n"
RECURSION = "def f(): f()\nf()\n"
SYNTAX = "compile('x = = 1', 'm.py', 'exec')\n"
CUSTOM = "class Boom(Exception):\n    pass\nraise Boom\n"


def printed(code: str) -> bytes:
    """What Python really prints when a program fails so."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False).stderr


@pytest.mark.parametrize("code", [CHAINED, GROUP, DURING, RECURSION, SYNTAX, CUSTOM])
def test_traceback_that_python_prints_is_one_record(code: str) -> None:
    content = printed(code)
    before, whole, after = texts(b"before\n" + content + b"[2026-11-29 17:03:41] after\n")
    assert (before, after) == ("before", "[2026-11-29 17:03:41] after")
    assert whole == content.decode().rstrip()


def test_error_behind_a_heading_of_sglang_is_joined_and_dated() -> None:
    head = b"[2026-11-29 17:03:41 TP0] Scheduler hit an exception: "
    (record,), reader = read(head + printed(DURING))
    assert record["text"].startswith("[2026-11-29 17:03:41 TP0] Scheduler hit an exception: Traceback")
    assert (record["level"], record["text"].splitlines()[-1]) == ("error", "KeyboardInterrupt")
    assert reader.counts.joined == 1


def test_tracebacks_that_ray_interleaves_are_told_apart() -> None:
    one, two = printed(DURING).decode().splitlines(), printed(CHAINED).decode().splitlines()
    lines = []
    for at in range(max(len(one), len(two))):
        lines += [f"\x1b[36m(A pid=1)\x1b[0m {one[at]}"] if at < len(one) else []
        lines += [f"(B pid=2, ip=10.0.0.2) {two[at]}"] if at < len(two) else []
    records, _ = read("\n".join(lines).encode() + b"\n(A pid=1) done\n")
    by_pid = {record["pid"]: record["text"] for record in records if record["text"] != "done"}
    assert by_pid == {1: "\n".join(one), 2: "\n".join(two)}


def test_dated_line_of_another_process_does_not_end_a_traceback() -> None:
    lines = printed(DURING).splitlines(keepends=True)
    records = texts(*lines[:2], b"[2026-11-29 17:03:41 TP1] meanwhile\n", *lines[2:])
    assert records == ["[2026-11-29 17:03:41 TP1] meanwhile", b"".join(lines).decode().rstrip()]


def test_text_after_a_traceback_is_no_part_of_it() -> None:
    assert len(texts(printed(CUSTOM) + b"plain words follow\n\n  and indented ones\n")) == 3


def test_endless_traceback_is_cut_into_bounded_records() -> None:
    content = b"Traceback (most recent call last):\n" + b'  File "x.py", line 1, in f\n' * 5000 + b"ValueError: x\n"
    records = texts(content)
    assert all(text.count("\n") < MAX_LINES and len(text) <= MAX_BYTES for text in records)
    assert "\n".join(records) + "\n" == content.decode()


def test_text_that_only_names_a_traceback_is_a_line() -> None:
    assert texts(b'grep "Traceback (most recent call last):" *.log\nnext\n') == [
        'grep "Traceback (most recent call last):" *.log',
        "next",
    ]
