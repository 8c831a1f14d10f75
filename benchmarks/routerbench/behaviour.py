"""How a router behaves when things break: the questions of a table, asked of any router in front of fake workers."""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

from benchmarks.routerbench import load
from benchmarks.routerbench.peers import Peer, Routed, routed, stats, workers
from benchmarks.routerbench.running import Cpus, running
from tests import tools

Row = dict[str, str]
UNKNOWN = (
    ("POST", "/flush_cache"),
    ("POST", "/pause_generation"),
    ("POST", "/abort_request"),
    ("POST", "/update_weights_from_disk"),
    ("GET", "/server_info"),
    ("GET", "/some/path?x=1"),
    ("GET", "/missing"),
    ("PUT", "/anything"),
)
CUSTOM = "x-custom: one\r\nauthorization: Bearer k\r\nuser-agent: probe\r\ncookie: a=b\r\n"
LEFT_LIMIT_S = 1.2


def behaviour(peer: Peer, cpus: Cpus, folder: Path) -> Row:
    """All answers of one router."""
    row: Row = {}
    if peer.command is None:
        return row
    row["no worker"] = _without_worker(peer, cpus, folder)
    with workers(1, cpus.load, folder) as urls, routed(peer, urls, cpus, folder) as one:
        row |= load.run(_with_one_worker(one))
    with _two_workers(cpus, folder) as (urls, kill), routed(peer, urls, cpus, folder) as two:
        row |= load.run(_one_dies(two, kill))
    return row


def _without_worker(peer: Peer, cpus: Cpus, folder: Path) -> str:
    if peer.name == "nginx":
        return "(does not start)"
    assert peer.command
    port = tools.free_port()
    command = peer.command(port, (), folder)
    with running(command, cpus=cpus.router, log=folder / "none.log") as process:
        deadline = time.monotonic() + 20.0
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                call = load.run(load.ask(f"http://127.0.0.1:{port}", load.request(load.body()), timeout_s=5.0))
                return f"{call.status} after {call.total_s:.1f} s" if call.complete else "waits for one"
            time.sleep(0.1)
    return "does not start"


async def _with_one_worker(at: Routed) -> Row:
    worker = at.workers[0]

    async def ask(marks: str = "", *, stream: bool = False, **more: str) -> str:
        before = await _stats(worker)
        call = await load.ask(at.url, load.request(load.body(marks, stream=stream), **more), timeout_s=20.0)
        return f"{_ended(call)}, {(await _stats(worker))['generates'] - before['generates']} hits"

    row = {"plain": await ask(target="/generate?foo=b%20r&x=1&x=2", extra=CUSTOM)}
    head = str((await _stats(worker))["last_head"])
    row["query kept"] = "yes" if "/generate?foo=b%20r&x=1&x=2 " in head else "no"
    row["host to the worker"] = "the worker's" if worker.removeprefix("http://") in head else "the client's"
    kept = [name for name in ("x-custom", "authorization", "user-agent", "cookie") if f"\n{name}:" in head.lower()]
    row["headers kept"] = ", ".join(kept)
    row["headers added"] = ", ".join(sorted(_names(head) - _names(load.request(b"", extra=CUSTOM).decode()))) or "none"
    before = (await _stats(worker))["body_bytes"]
    await ask()
    arrived = (await _stats(worker))["body_bytes"] - before
    row["body"] = "verbatim" if arrived == len(load.body()) else f"{len(load.body())} bytes become {arrived}"
    for status in (400, 500, 503):
        row[f"{status} from the worker"] = await ask(f"@status={status}@")
    row["worker closes, no answer"] = await ask("@die@")
    row["worker closes at half"] = await ask("@half@")
    row["worker closes amid a stream"] = await ask("@die@ @gap=2000@", stream=True)
    row["stream"] = await ask("@gap=2000@", stream=True)
    for method, target in UNKNOWN:
        call = await load.ask(at.url, load.request(b"{}", target=target, method=method), timeout_s=10.0)
        row[f"{method} {target}"] = _ended(call)
    row["chunked request body"] = await _chunked(at)
    row["client leaves a wait"] = await _leave(at, load.body("@wait=1500@"))
    row["client leaves a stream"] = await _leave(at, load.body("@chunks=100@ @gap=15000@", stream=True))
    row["keep-alive race, 300"] = await _race(at)
    return row


async def _one_dies(at: Routed, kill: Callable[[], None]) -> Row:
    asked = asyncio.create_task(load.crowd(at.url, 40, load.request(load.body("@wait=1000@")), timeout_s=20.0))
    await asyncio.sleep(0.5)
    kill()
    dead = await asked
    started, later = time.perf_counter(), Counter[str]()
    for _ in range(40):
        later[_ended(await load.ask(at.url, load.request(load.body()), timeout_s=20.0))] += 1
    return {
        "one of two killed, 40 in flight": f"{_counts(dead.outcomes)}, {dead.seconds:.1f} s",
        "then 40 one by one": f"{_counts(later)}, {time.perf_counter() - started:.1f} s",
    }


@contextlib.contextmanager
def _two_workers(cpus: Cpus, folder: Path) -> Generator[tuple[list[str], Callable[[], None]]]:
    """Urls of both, and what kills the second."""
    with workers(1, cpus.load, folder) as stays, contextlib.ExitStack() as stack:
        dies = stack.enter_context(workers(1, cpus.load, folder, by=signal.SIGKILL))
        yield [*stays, *dies], stack.close


async def _chunked(at: Routed) -> str:
    content = load.body()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    call = await load.ask(at.url, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content), timeout_s=5.0)
    return _ended(call)


async def _leave(at: Routed, content: bytes) -> str:
    before = (await _stats(at.workers[0]))["aborted"]
    call = await load.connect(at.url)
    call.send(load.request(content))
    await asyncio.sleep(0.3)
    call.transport.abort()
    left = time.perf_counter()
    while time.perf_counter() - left < LEFT_LIMIT_S:
        if (await _stats(at.workers[0]))["aborted"] > before:
            return f"upstream closed within {max(1.0, 1e3 * (time.perf_counter() - left)):.0f} ms"
        await asyncio.sleep(0.005)
    return "upstream stays open"


async def _race(at: Routed) -> str:
    """The worker closes an idle connection 5 ms after an answer, about when the next request comes."""
    before, outcomes = (await _stats(at.workers[0]))["generates"], Counter[str]()
    for _ in range(300):
        outcomes[_ended(await load.ask(at.url, load.request(load.body("@close=5@")), timeout_s=10.0))] += 1
        await asyncio.sleep(random.uniform(0.0035, 0.0062))
    return f"{_counts(outcomes)}, {(await _stats(at.workers[0]))['generates'] - before} hits"


async def _stats(worker: str) -> dict[str, int]:
    return await asyncio.to_thread(stats, worker)


def _ended(call: load.Call) -> str:
    if not call.done.done():
        return "no answer"
    if not call.complete:
        return f"{call.status} cut" if call.status else "closed"
    said_error = call.status == 200 and b"error" in call.start_of_body[-400:]
    return f"{call.status}{' ended cleanly after an error' if said_error else ''}"


def _counts(outcomes: Counter[str]) -> str:
    return ", ".join(f"{num} x {name}" for name, num in sorted(outcomes.items()))


def _names(head: str) -> set[str]:
    return {line.split(":")[0].strip().lower() for line in head.splitlines()[1:] if ":" in line}
