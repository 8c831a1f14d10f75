"""rsyslog with RELP, and a client that speaks RELP: the peer of the ingest benchmark. Nothing else uses it.

RELP frames: `NUMBER COMMAND LENGTH DATA\\n`; each is answered by `NUMBER rsp LENGTH 200 OK\\n` once rsyslog has it
where its queue says: in the disk queue's file, or with no queue in the output's, synced.
"""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WINDOW = 128
"""Messages in flight a connection; librelp's own default."""
START_S = 10.0
LIMIT_S = 120.0

_CONFIG = """
global(workDirectory="{folder}" maxMessageSize="64k")
module(load="imrelp" ruleset="all")
template(name="raw" type="string" string="%rawmsg%\\n")
ruleset(name="all" {queue}) {{
    action(type="omfile" file="{output}" template="raw" {action})
}}
input(type="imrelp" address="127.0.0.1" port="{port}")
"""
_QUEUES = {
    "disk": ('queue.type="Disk" queue.filename="queue" queue.checkpointInterval="1000" queue.size="2000000"', ""),
    "direct": ('queue.type="Direct"', 'sync="on" asyncWriting="off"'),
}


@dataclass(frozen=True)
class Delivered:
    """What a job came to."""

    lines_per_s: float
    cpu_s_per_100k: float
    peak_rss_mb: float
    num_lines: int


def why_absent(tools: Path) -> str:
    """Why there is no rsyslog to compare with. Empty: there is."""
    if not (tools / "apt/usr/sbin/rsyslogd").is_file():
        return f"{tools / 'apt/usr/sbin/rsyslogd'} is not there; make tools fetches it"
    if not list((tools / "apt").glob("usr/lib/*/rsyslog/imrelp.so")):
        return "rsyslog has no imrelp module; make tools fetches it"
    return ""


def run_rsyslog(
    tools: Path, folder: Path, *, mode: str, num_connections: int, num_lines: int, line: bytes
) -> Delivered:
    """The same job by rsyslog: lines over loopback into one file; done when the last is there and synced."""
    output = folder / f"{mode}.log"
    each = num_lines // num_connections
    with _rsyslogd(tools, folder, mode, output) as (process, port):
        began = time.perf_counter()
        threads = [threading.Thread(target=_send, args=(port, line, each)) for _ in range(num_connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        _wait_for_size(output, each * num_connections * (len(line) + 1))
        seconds = time.perf_counter() - began
        status = Path(f"/proc/{process.pid}/status").read_text()
        cpu_s = _cpu_s(process.pid)
    peak_kb = next(int(row.split()[1]) for row in status.splitlines() if row.startswith("VmHWM"))
    total = each * num_connections
    return Delivered(total / seconds, cpu_s / total * 1e5, peak_kb / 1024, total)


@contextmanager
def _rsyslogd(tools: Path, folder: Path, mode: str, output: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    queue, action = _QUEUES[mode]
    config = folder / f"{mode}.conf"
    config.write_text(_CONFIG.format(folder=folder, output=output, port=port, queue=queue, action=action))
    root = tools.absolute() / "apt"
    libraries = ":".join(str(path) for path in sorted(root.glob("usr/lib/*-linux-gnu*")))
    (modules,) = root.glob("usr/lib/*/rsyslog")
    command = [str(root / "usr/sbin/rsyslogd"), "-n", "-f", str(config), "-i", str(folder / "pid"), "-M", str(modules)]
    with (folder / f"{mode}.err").open("wb") as said:
        process = subprocess.Popen(command, env={**os.environ, "LD_LIBRARY_PATH": libraries}, stdout=said, stderr=said)
    try:
        _wait_for_port(port, process)
        yield process, port
    finally:
        process.kill()
        process.wait(10)


def _send(port: int, line: bytes, num_lines: int) -> None:
    """One connection: WINDOW lines in flight, until each is answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        offer = b"relp_version=0\nrelp_software=furlong-bench\ncommands=syslog"
        connection.sendall(b"1 open %d %s\n" % (len(offer), offer))
        _read_open(connection)
        frame_end = b" syslog %d %s\n" % (len(line), line)
        sent = answered = 0
        while answered < num_lines:
            more = min(WINDOW - (sent - answered), num_lines - sent)
            if more:
                connection.sendall(
                    b"".join(b"%d%s" % (number, frame_end) for number in range(sent + 2, sent + more + 2))
                )
                sent += more
            got = connection.recv(65536)
            if not got:
                raise ConnectionError("rsyslog closed the connection")
            answered += got.count(b"\n")
        connection.sendall(b"%d close 0\n" % (num_lines + 2))


def _read_open(connection: socket.socket) -> None:
    """`1 rsp LENGTH 200 OK\\n...`."""
    got = b""
    while got.count(b" ") < 3:
        got += connection.recv(4096)
    number, _, length, rest = got.split(b" ", 3)
    missing = int(length) + 1 - len(rest)
    while missing > 0:
        missing -= len(connection.recv(missing))
    if number != b"1" or not rest.startswith(b"200"):
        raise ConnectionError(f"rsyslog refused: {got[:100]!r}")


def _wait_for_size(path: Path, size_bytes: int) -> None:
    """All lines are in the file, and the file on the disk."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() or path.stat().st_size < size_bytes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} has not all lines after {LIMIT_S:g} s")
        time.sleep(0.002)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _wait_for_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            raise ConnectionError(f"rsyslogd ended with {process.returncode}")
        time.sleep(0.02)
    raise TimeoutError("rsyslogd does not listen")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
