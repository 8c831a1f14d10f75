"""A process that behaves as a service does, as told by its arguments; for tests of supervision.

It is leashed to its parent, publishes itself and says SERVING, prints, may start a process of its own (as rollout
starts engines), and ends when told to, or by itself, with any exit code.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from furlong import addresses
from furlong.process import die_with_parent
from furlong.rpc import start_server
from furlong.rundir import RunDir


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instance", required=True)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--lines", type=int, default=0, help="lines to print at once")
    parser.add_argument("--ends-with", type=int, default=None, help="end by itself with this exit code")
    parser.add_argument("--after-s", type=float, default=0.0, help="... this long after it serves")
    parser.add_argument("--before-serving", action="store_true", help="... or before it serves")
    parser.add_argument("--drains-with", type=int, default=3, help="exit code after SIGTERM")
    parser.add_argument("--drain-s", type=float, default=0.0)
    parser.add_argument("--slow-start", action="store_true", help="never say SERVING")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--engine", choices=["leashed", "loose"], help="start a process of its own")
    return parser.parse_args()


def start_engine(kind: str, path: Path) -> None:
    """A child in a session of its own, as an engine is; loose: without a leash."""
    leash = f"from furlong.process import die_with_parent; die_with_parent({os.getpid()})"
    code = f"{leash if kind == 'leashed' else ''}\nimport time; time.sleep(300)"
    engine = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    path.write_text(str(engine.pid))


async def serve(given: argparse.Namespace, stop: threading.Event) -> int:
    run_dir = RunDir(Path(given.run_dir))
    server = await start_server(lambda grpc: None, names=(), host="127.0.0.1")
    addresses.publish(run_dir, given.instance, grpc=server.address)
    if given.engine:
        start_engine(given.engine, run_dir.root / f"{given.instance}.engine")
    await server.set_serving(serving=not given.slow_start)
    limit = time.monotonic() + given.after_s
    while not stop.is_set():
        if given.ends_with is not None and time.monotonic() >= limit:
            print(f"{given.instance} ends by itself", end="", flush=True)  # no newline: its last line counts too
            return given.ends_with
        await asyncio.sleep(0.01)
    (run_dir.root / f"{given.instance}.draining").touch()
    await asyncio.sleep(given.drain_s)
    return given.drains_with


def tell_drained(given: argparse.Namespace) -> None:
    with open(Path(given.run_dir) / "order", "a") as order:
        order.write(f"{given.instance}\n")
    print(f"{given.instance} drained", flush=True)


def main() -> int:
    given = read_arguments()
    die_with_parent(given.parent_pid)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if given.deaf else lambda *_: stop.set())
    for number in range(given.lines):
        print(f"row {number} " + "x" * 100)
    sys.stdout.flush()
    if given.before_serving:
        print("cannot load the model: disk is on fire", file=sys.stderr, flush=True)
        return given.ends_with or 0
    code = asyncio.run(serve(given, stop))
    if stop.is_set():
        tell_drained(given)
    return code


if __name__ == "__main__":
    sys.exit(main())
