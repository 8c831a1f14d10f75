"""A log call gives one line, whatever is logged and wherever it goes; it never raises and never waits."""

import datetime
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.contextvars import bind_contextvars, clear_contextvars

from furlong import logs
from furlong.jsonline import MAX_LINE_BYTES

log = structlog.get_logger()


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class BadException(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A configured log file."""
    clear_contextvars()
    configure(tmp_path / "log.jsonl")
    yield tmp_path / "log.jsonl"
    clear_contextvars()
    logs.configure(run="", service="", instance="", path=None, telemetry=None)


def configure(path: Path | None, **more: Any) -> None:
    logs.configure(run="r", service="s", instance="s-0", path=path, telemetry=None, **more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_line_starts_with_time_level_event_and_who(path: Path) -> None:
    configure(path, rank=2)
    bind_contextvars(rollout_id=3)
    log.info("weights_loaded", version=7, seconds=1.8)
    (line,) = lines(path)
    keys = ["ts", "level", "event", "run", "service", "instance", "rank", "rollout_id", "version", "seconds"]
    assert list(line) == keys
    assert datetime.datetime.strptime(line["ts"], "%Y-%m-%dT%H:%M:%S.%fZ")
    assert (line["level"], line["event"], line["rank"], line["rollout_id"]) == ("info", "weights_loaded", 2, 3)


CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"\xff\xfe", "��"),
        ("\ud800", "?"),
        (float("nan"), "NaN"),
        (-float("inf"), "-Infinity"),
        ([1.0, {"x": float("inf")}], [1.0, {"x": "Infinity"}]),
        (Unprintable(), "[unprintable Unprintable: RuntimeError]"),
        (CIRCULAR, ["[circular]"]),
        (2**80, str(2**80)),
        ({1: 2, None: 3}, {"1": 2, "None": 3}),
        ({3}, [3]),
        (Path("/a"), "/a"),
        (ValueError("x"), "ValueError('x')"),
        (object, "<class 'object'>"),
        (None, None),
    ],
)
def test_anything_can_be_logged(path: Path, value: object, shown: object) -> None:
    log.info("x", value=value)
    assert lines(path)[0]["value"] == shown


def test_numpy_and_torch_values_are_numbers(path: Path) -> None:
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    log.info(
        "x", a=np.float32(0.5), b=np.int64(2), c=np.bool_(True), d=torch.tensor(0.5), e=np.ones(2), f=np.ones(9999)
    )
    line = lines(path)[0]
    assert [line[key] for key in "abcde"] == [0.5, 2, True, 0.5, [1.0, 1.0]]
    assert line["f"] == "[ndarray (9999,)]"


def test_deep_and_huge_values_are_clipped_with_a_mark(path: Path) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    log.info(
        "x", deep=deep, text="y" * 1_000_000, many=list(range(100_000)), **{f"k{n}": "z" * 16_000 for n in range(40)}
    )
    assert len(path.read_bytes()) <= MAX_LINE_BYTES + 1
    line = lines(path)[0]
    assert line["event"] == "x"
    assert "too deep" in json.dumps(line["deep"])
    assert "983616 more characters" in line["text"] or "left out" in line["text"]


def test_call_never_raises_for_its_keys(path: Path) -> None:
    log.info("x", event="mine", ts=1, level="l", method_name=2, self=3, service="other", **{"a b": 4, "\ud800": 5})
    log.info("%s of %d", "one", "two")
    log.info(None)
    log.info(Unprintable())
    first = lines(path)[0]
    assert (first["event"], first["event_"], first["service"], first["service_"]) == ("x", "mine", "s", "other")
    assert len(lines(path)) == 4


def test_exception_is_one_field_of_one_line(path: Path) -> None:
    try:
        raise BadException
    except BadException:
        log.exception("failed", value=Unprintable())
    log.error("failed", exc_info=ValueError("why"))
    first, second = lines(path)
    assert "BadException" in first["exception"]
    assert "ValueError: why" in second["exception"]


def test_lower_levels_are_not_written_also_by_cached_loggers(path: Path) -> None:
    log.debug("hidden")
    configure(path, level="debug")
    log.debug("shown")
    configure(path, level="error")
    log.warning("hidden")
    assert [line["event"] for line in lines(path)] == ["shown"]


def test_forked_child_says_its_own_rank(path: Path) -> None:
    configure(path, rank=0)
    bind_contextvars(rank=0)
    log.info("parent")
    child = os.fork()
    if child == 0:
        log.info("unknown")
        bind_contextvars(rank=1)
        log.info("bound")
        configure(path, rank=2)
        log.info("configured")
        os._exit(0)
    os.waitpid(child, 0)
    ranks = {line["event"]: line.get("rank") for line in lines(path)}
    assert ranks == {"parent": 0, "unknown": None, "bound": 1, "configured": 1}


def test_log_is_appended_and_a_torn_line_ended_first(path: Path) -> None:
    path.write_bytes(b'{"step": 3}\n{"step": 4, "lo')
    configure(path)
    log.info("next")
    first, torn, told, following = path.read_bytes().splitlines()
    assert (first, torn) == (b'{"step": 3}', b'{"step": 4, "lo')
    assert json.loads(told)["event"] == "torn_line_ended" and json.loads(following)["event"] == "next"


def test_full_disk_does_not_stop_the_caller() -> None:
    configure(Path("/dev/full"))
    log.info("x")
    configure(None)


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", ">/dev/null 2>&1"])
def test_stderr_that_takes_nothing_does_not_stop_the_caller(redirect: str) -> None:
    code = (
        "import structlog; from furlong import logs;"
        "logs.configure(run='r', service='s', instance='i', path=None, to_stderr=True, telemetry=None);"
        "[structlog.get_logger().info('x', n=n) for n in range(100)]"
    )
    done = subprocess.run(f"{sys.executable} -c {code!r} {redirect}", shell=True, timeout=30, check=False)
    assert done.returncode == 0


def test_stderr_that_was_closed_from_the_start_is_no_other_file(tmp_path: Path) -> None:
    code = (
        "import sys; other = open(sys.argv[1], 'w'); import structlog; from furlong import logs;"  # it gets number 2
        "logs.configure(run='r', service='s', instance='i', path=None, to_stderr=True, telemetry=None);"
        "structlog.get_logger().info('x')"
    )
    command = f"{sys.executable} -c {code!r} {tmp_path / 'other'} 2>&-"
    assert subprocess.run(command, shell=True, timeout=30, check=False).returncode == 0
    assert (tmp_path / "other").read_text() == ""


def test_stderr_that_nobody_reads_does_not_stop_the_caller() -> None:
    code = (
        "import structlog, sys; from furlong import logs;"
        "logs.configure(run='r', service='s', instance='i', path=None, to_stderr=True, telemetry=None);"
        "[structlog.get_logger().info('x', text='y' * 10000) for n in range(1000)]; print('done', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_standard_library_joins_at_warning_and_above(path: Path) -> None:
    logging.getLogger("uvicorn.error").info("quiet")
    logging.getLogger("some.library").warning("loud %s", "one")
    logging.getLogger("transformers").error("bad %d", "format")
    logging.getLogger("uvicorn.error").critical("end")
    found = [(line["level"], line["logger"], line["message"]) for line in lines(path)]
    assert found[0] == ("warning", "some.library", "loud one")
    assert found[1][:2] == ("error", "transformers") and "bad arguments" in found[1][2]
    assert found[2:] == [("critical", "uvicorn.error", "end")]


@pytest.mark.parametrize("secret", ["SECRET123", 'a"b\\c SECRET', "12345678"])
def test_secrets_of_the_environment_are_redacted_everywhere(
    path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("SOME_API_KEY", secret)
    configure(path)
    number = int(secret) if secret.isdigit() else 0
    try:
        raise ValueError(f"with {secret}")
    except ValueError:
        log.exception(
            f"x {secret}", text=f"a{secret}b", deep=[{secret: (secret,)}], n=number, long="y" * 16_380 + secret
        )
    assert secret not in path.read_text() and json.dumps(secret)[1:-1] not in path.read_text()
    assert "[redacted]" in lines(path)[0]["text"]


def test_secret_in_a_file_and_quoted_in_an_address_is_redacted(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("s3cret/value+x\n")
    monkeypatch.setenv("WANDB_API_KEY_FILE", str(tmp_path / "key"))
    configure(path)
    log.info("x", plain="s3cret/value+x", quoted="http://h/?k=s3cret%2Fvalue%2Bx")
    assert "s3cret" not in path.read_text()


def test_writers_of_several_threads_do_not_mix_lines(path: Path) -> None:
    def write(number: int) -> None:
        for n in range(50):
            log.info("x", writer=number, n=n, text="y" * 10_000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(path)) == 400


def test_capture_logs_works_in_tests(path: Path) -> None:
    with structlog.testing.capture_logs() as captured:
        log.info("x", n=1)
    assert captured == [{"event": "x", "n": 1, "log_level": "info"}]
