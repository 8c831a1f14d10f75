"""Who listens where, told between processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
import psutil
import pytest

from furlong.addresses import (
    NotReachable,
    find,
    join_host_port,
    publish,
    read_addresses,
    wait_for,
    withdraw,
)
from furlong.rundir import RunDir

PUBLISH = """
import sys
from pathlib import Path
from furlong.addresses import publish
from furlong.rundir import RunDir
for number in range(20):
    publish(RunDir(Path(sys.argv[1])), f"{sys.argv[2]}-{number}", grpc=f"127.0.0.1:{number + 1}")
print("published", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path).create()


def publisher(run_dir: RunDir, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PUBLISH, str(run_dir.root), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def published(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "published\n"


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=10)


def test_what_is_published_is_found(run_dir: RunDir) -> None:
    publish(run_dir, "router", grpc="127.0.0.1:1", http="http://127.0.0.1:2", extra={"store": "x"})
    entry = find(run_dir, "router")
    assert entry is not None and entry.alive() and entry.pid == os.getpid()
    assert (entry.grpc, entry.http, entry.extra) == ("127.0.0.1:1", "http://127.0.0.1:2", {"store": "x"})
    assert find(run_dir, "rollout") is None


def test_publishers_at_once_lose_no_entry(run_dir: RunDir) -> None:
    processes = [publisher(run_dir, f"p{number}") for number in range(4)]
    try:
        for process in processes:
            published(process)
        assert len(read_addresses(run_dir)) == 80
        assert all(entry.alive() for entry in read_addresses(run_dir).values())
    finally:
        for process in processes:
            end(process)
    assert find(run_dir, "p0-0") is None


def test_an_entry_of_a_killed_process_does_not_count_even_before_it_is_reaped(run_dir: RunDir) -> None:
    process = publisher(run_dir, "p")
    published(process)
    assert find(run_dir, "p-0") is not None
    process.kill()
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    assert find(run_dir, "p-0") is None
    end(process)
    assert find(run_dir, "p-0") is None


@pytest.mark.parametrize("ticks", [True, False])
def test_another_process_with_the_same_pid_does_not_count(run_dir: RunDir, *, ticks: bool) -> None:
    publish(run_dir, "router", grpc="127.0.0.1:1")
    tree = orjson.loads(run_dir.addresses.read_bytes())
    if ticks:
        tree["router"]["start_ticks"] += 1
    else:
        tree["router"].update(start_ticks=0, process_started=tree["router"]["process_started"] - 100)
    run_dir.addresses.write_bytes(orjson.dumps(tree))
    assert find(run_dir, "router") is None


def test_a_clock_that_is_set_kills_nobody(run_dir: RunDir) -> None:
    publish(run_dir, "router", grpc="127.0.0.1:1")
    tree = orjson.loads(run_dir.addresses.read_bytes())
    tree["router"]["process_started"] += 3600
    run_dir.addresses.write_bytes(orjson.dumps(tree))
    assert find(run_dir, "router") is not None


def test_publishing_again_replaces_and_withdrawing_removes_only_ones_own(run_dir: RunDir) -> None:
    publish(run_dir, "router", grpc="127.0.0.1:1")
    publish(run_dir, "router", grpc="127.0.0.1:2")
    entry = find(run_dir, "router")
    assert entry is not None and entry.grpc == "127.0.0.1:2"
    process = publisher(run_dir, "p")
    published(process)
    withdraw(run_dir, "p-0")
    withdraw(run_dir, "router")
    withdraw(run_dir, "router")
    assert "p-0" in read_addresses(run_dir) and "router" not in read_addresses(run_dir)
    end(process)


def test_waiting_ends_when_it_appears(run_dir: RunDir) -> None:
    process = publisher(run_dir, "late")
    assert wait_for(run_dir, "late-0", timeout_s=20).grpc == "127.0.0.1:1"
    end(process)


def test_waiting_in_vain_says_for_what_and_how_long(run_dir: RunDir) -> None:
    with pytest.raises(NotReachable, match=r"router did not appear .* within 0.1 s.*--start-timeout-s"):
        wait_for(run_dir, "router", timeout_s=0.1)


def test_an_entry_of_a_newer_furlong_is_read(run_dir: RunDir) -> None:
    publish(run_dir, "router", grpc="127.0.0.1:1")
    tree = orjson.loads(run_dir.addresses.read_bytes())
    tree["router"]["unheard_of"] = 1
    run_dir.addresses.write_bytes(orjson.dumps(tree))
    assert find(run_dir, "router") is not None


@pytest.mark.parametrize(
    ("host", "joined"),
    [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("[::1]", "[::1]:7"), ("localhost", "localhost:7")],
)
def test_host_and_port(host: str, joined: str) -> None:
    assert join_host_port(host, 7) == joined


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b'{"roll', b"[1,2]", b"null", b"\x00\xff", b'{"rollout": "x"}', b'{"rollout": {"grpc": "h:1"}}'),
        *(b'{"rollout": {"pid": "abc"}}', b'{"rollout": {"pid": 5, "grpc": 7}}', b'{"rollout": {"pid": -3}}'),
    ],
)
def test_damaged_file_holds_no_entries_and_is_written_anew(tmp_path: Path, content: bytes) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.addresses.write_bytes(content)
    assert not any(entry.alive() for entry in read_addresses(run_dir).values())
    assert find(run_dir, "rollout") is None
    publish(run_dir, "router", grpc="127.0.0.1:1")
    assert [entry.instance for entry in read_addresses(run_dir).values() if entry.alive()] == ["router"]


def test_damaged_entry_hides_no_other(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    publish(run_dir, "router", grpc="127.0.0.1:1")
    tree = orjson.loads(run_dir.addresses.read_bytes())
    run_dir.addresses.write_bytes(orjson.dumps({**tree, "rollout": {"pid": None}}))
    assert find(run_dir, "router") is not None
