"""The parts of the measure. Each takes a router that runs, loads it, and gives named figures."""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.routerbench import load
from benchmarks.routerbench.peers import Routed, stats
from benchmarks.routerbench.running import cpu_s, forget_peak, rss_mib

Figures = dict[str, float]
MEGABYTE = 1024 * 1024


@dataclass(frozen=True)
class Effort:
    """How long and how much."""

    concurrency: tuple[int, ...] = (1, 16, 64, 256)
    seconds: int = 2
    num_streams: int = 12
    num_chunks: int = 384
    """Of each of 64 streams at once, 5 ms apart."""
    crowd: int = 2048
    num_idle: int = 10_000


QUICK = Effort(concurrency=(1, 64), seconds=1, num_streams=8, num_chunks=256)


def rates(routed: Routed, effort: Effort) -> Figures:
    """Requests a second, latency and processor time at full speed."""
    figures: Figures = {}
    load.closed_loop(routed.url, load.body(), concurrency=16, seconds=1)
    for concurrency in effort.concurrency:
        before, wall = _cpus(routed), time.monotonic()
        rate = load.closed_loop(routed.url, load.body(), concurrency=concurrency, seconds=effort.seconds)
        parts = [after - before.get(pid, 0.0) for pid, after in _cpus(routed).items()]
        used, wall = sum(parts), time.monotonic() - wall
        figures |= {
            f"req/s c={concurrency}": rate.num_requests / rate.seconds,
            f"cpu/10k c={concurrency}": 1e4 * used / max(1, rate.num_requests),
            f"p50 us c={concurrency}": rate.p50_us,
            f"p99 us c={concurrency}": rate.p99_us,
            f"errors c={concurrency}": rate.num_errors,
            f"cpus used c={concurrency}": used / wall,
            f"busiest share c={concurrency}": max(parts) / used if used else 0.0,
        }
    return figures


def slow_worker(routed: Routed, effort: Effort) -> Figures:
    """256 requests in flight on a worker that takes 50 ms: 5,120 a second are ideal."""
    before = _cpu(routed)
    rate = load.closed_loop(routed.url, load.body("@wait=50@"), concurrency=256, seconds=effort.seconds)
    used = _cpu(routed) - before
    return {
        "50 ms req/s": rate.num_requests / rate.seconds,
        "50 ms p99 us": rate.p99_us,
        "50 ms cpu/10k": 1e4 * used / max(1, rate.num_requests),
        "50 ms errors": rate.num_errors,
    }


def streams(routed: Routed, effort: Effort) -> Figures:
    """The first byte of a stream, whether pieces come as they are sent, and processor time of many streams."""
    single = load.request(load.body("@chunks=32@ @gap=2000@", stream=True))

    async def one_by_one() -> list[load.Call]:
        return [await load.ask(routed.url, single) for _ in range(effort.num_streams)]

    calls = load.run(one_by_one())
    many = load.request(load.body(f"@chunks={effort.num_chunks}@ @gap=5000@", stream=True))
    before = _cpu(routed)
    together = load.run(load.crowd(routed.url, 64, many))
    return {
        "first byte ms": 1e3 * statistics.median(call.first_byte_s for call in calls),
        "reads of 33": statistics.median(call.num_reads for call in calls),
        "cpu/10k chunks": 1e4 * (_cpu(routed) - before) / (64 * effort.num_chunks),
        "first byte ms c=64": 1e3 * statistics.median(call.first_byte_s for call in together.calls),
        "streams over s": together.seconds - effort.num_chunks * 0.005,
        "streams failed": together.num_failed + sum(not call.complete or call.status != 200 for call in calls),
    }


def many_at_once(routed: Routed, effort: Effort) -> Figures:
    """Requests of 2 s, all at the same moment."""
    before_hits, before = _hits(routed), _cpu(routed)
    crowd = load.run(load.crowd(routed.url, effort.crowd, load.request(load.body("@wait=2000@"))))
    return {
        "crowd failed": crowd.num_failed,
        "crowd over s": crowd.seconds - 2.0,
        "crowd cpu s": _cpu(routed) - before,
        "crowd hits": _hits(routed) - before_hits,
    }


def large_body(routed: Routed, effort: Effort) -> Figures:
    """40 MB up, three times."""
    idle_mib = _rss(routed)
    _forget_peak(routed)
    message = load.request(load.body(image_data="QUJD" * (10 * MEGABYTE)))
    before = sum(stats(worker)["body_bytes"] for worker in routed.workers)

    async def thrice() -> list[load.Call]:
        return [await load.ask(routed.url, message, timeout_s=60.0) for _ in range(3)]

    calls = load.run(thrice())
    arrived = sum(stats(worker)["body_bytes"] for worker in routed.workers) - before
    return {
        "idle MiB": idle_mib,
        "40 MB s": statistics.median(call.total_s for call in calls),
        "40 MB failed": sum(not call.complete or call.status != 200 for call in calls),
        "40 MB arrived": arrived / 3 / len(message),
        "40 MB peak MiB": _rss(routed, peak=True),
    }


def idle_connections(routed: Routed, effort: Effort) -> Figures:
    """Memory with many connections that have nothing to do."""

    async def held() -> tuple[int, float]:
        calls, answered = await load.hold_open(routed.url, effort.num_idle, load.request(load.body()))
        await asyncio.sleep(0.2)  # what a router does once a connection falls idle
        memory = _rss(routed)
        for call in calls:
            call.transport.abort()
        return answered, memory

    answered, memory = load.run(held())
    return {"open": answered, "open MiB": memory, "peak MiB": _rss(routed, peak=True)}


PARTS: Mapping[str, Callable[[Routed, Effort], Figures]] = {
    "body": large_body,
    "rates": rates,
    "slow": slow_worker,
    "streams": streams,
    "crowd": many_at_once,
    "idle": idle_connections,
}
"""In this order: what a body costs is measured before others have left memory behind, what a crowd leaves after."""


def _cpu(routed: Routed) -> float:
    return sum(_cpus(routed).values())


def _cpus(routed: Routed) -> dict[int, float]:
    return cpu_s(routed.pid) if routed.pid else {}


def _rss(routed: Routed, *, peak: bool = False) -> float:
    return rss_mib(routed.pid, peak=peak) if routed.pid else 0.0


def _forget_peak(routed: Routed) -> None:
    if routed.pid:
        forget_peak(routed.pid)


def _hits(routed: Routed) -> int:
    return sum(stats(worker)["generates"] for worker in routed.workers)
