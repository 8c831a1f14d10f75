"""GET /metrics of a router that works: what it tells is what the workers saw."""

import asyncio
import gzip
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.router.watch.snapshot import Snapshot, ended
from tests.metrics.prometheus.scraping import prometheus_scraping
from tests.metrics.running import until
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import FakeWorker, Seen
from tests.router.waiting import eventually
from tests.router.watch.passages import FakePassage, observer_of
from tests.router.watch.test_exposition import read

GENERATE = ("path_class", "generate")


async def answer_by_path(seen: Seen) -> None:
    """`/v1/completions` is answered 500, anything else well."""
    if seen.path == b"/v1/completions":
        await seen.answer(b"no", status=b"500 Internal Server Error")
    else:
        await seen.answer(b"x" * 100)


async def scrape(router: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with router.http.get(f"{router.url}/metrics", headers={"accept-encoding": "identity"}) as answer:
        assert answer.status == 200 and answer.content_type == "text/plain"
        return read(await answer.text())


async def ask(router: Running, path: str, *, count: int) -> None:
    async def one() -> None:
        async with router.http.post(f"{router.url}{path}", data=b"y" * 50) as answer:
            await answer.read()

    await asyncio.gather(*(one() for _ in range(count)))


def num_seen(workers: list[FakeWorker], path: bytes) -> list[int]:
    return [sum(seen.path == path for seen in worker.requests) for worker in workers]


async def test_scrape_equals_what_workers_saw(router: Running, start_worker: StartWorker) -> None:
    workers = [await start_worker(answer_by_path) for _ in range(3)]
    for worker in workers:
        await router.add(worker)
    await ask(router, "/generate?secret=1", count=60)
    await ask(router, "/v1/completions", count=6)
    found = await scrape(router)
    for worker, num in zip(workers, num_seen(workers, b"/generate"), strict=True):
        assert num and found["worker_requests_total", (GENERATE, ("status", "200"), ("worker", worker.url))] == num
        assert found["worker_ready", (("worker", worker.url),)] == 1
        assert found["worker_in_flight", (("worker", worker.url),)] == 0
        probes = found["worker_probes_total", (("result", "good"), ("worker", worker.url))]
        assert 1 <= probes <= len(worker.probes)
    assert found["requests_total", (("path_class", "completions"), ("status", "500"))] == 6
    assert found["errors_total", (("kind", "worker_status"),)] == 6
    assert found["request_seconds_count", (GENERATE,)] == found["first_byte_seconds_count", (GENERATE,)] == 60
    assert (found["received_bytes_total", (GENERATE,)], found["sent_bytes_total", (GENERATE,)]) == (3000, 6000)
    assert found["workers", (("state", "ready"),)] == 3 and found["connections", ()] >= 1


async def test_requests_that_wait_and_run_are_told(start_router: StartRouter, start_worker: StartWorker) -> None:
    router, go = await start_router(max_in_flight=1), asyncio.Event()

    async def wait(seen: Seen) -> None:
        await go.wait()
        await seen.answer()

    worker = await start_worker(wait)
    await router.add(worker)
    asking = asyncio.create_task(ask(router, "/generate", count=3))
    await eventually(lambda: router.listening.router.workers.num_waiting() == 2, "two that wait")
    found = await scrape(router)
    assert (found["queue_length", ()], found["worker_in_flight", (("worker", worker.url),)]) == (2, 1)
    go.set()
    await asking
    found = await scrape(router)
    assert found["queue_seconds_count", (GENERATE,)] == 2
    assert (found["queue_length", ()], found["worker_in_flight", (("worker", worker.url),)]) == (0, 0)


async def test_request_sent_to_another_worker_is_a_retry_and_counted_once(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(health_interval_s=60.0)
    dead, alive = await start_worker(), await start_worker()
    for worker in (dead, alive):
        await router.add(worker)
    await dead.die()
    await ask(router, "/generate", count=4)
    found = await scrape(router)
    assert found["requests_total", (GENERATE, ("status", "200"))] == 4
    assert sum(value for (name, _), value in found.items() if name == "retries_total") >= 1


async def test_request_without_worker_and_unknown_paths_make_few_series(start_router: StartRouter) -> None:
    router = await start_router(queue_timeout_s=0.05)
    await asyncio.gather(*(ask(router, f"/any/{number}", count=1) for number in range(20)))
    found = await scrape(router)
    assert found["requests_total", (("path_class", "other"), ("status", "503"))] == 20
    assert [labels for name, labels in found if name == "errors_total"] == [(("kind", "no_ready_worker"),)]
    assert not any(name.startswith("worker_") for name, _ in found)


async def test_scrape_is_of_all_processes(router: Running) -> None:
    other, ended_one = observer_of(), observer_of()
    other.process = "1"
    for observer in (other, ended_one):
        observer.finished(FakePassage())

    async def others() -> list[Snapshot]:
        return [other.snapshot(), ended(ended_one.snapshot())]

    router.listening.router.observer.others = others
    found = await scrape(router)
    assert found["requests_total", (GENERATE, ("status", "200"))] == 2
    assert {labels for name, labels in found if name == "process_resident_bytes"} == {
        (("process", "0"),),
        (("process", "1"),),
    }


async def test_line_of_a_failure_has_the_clients_ids(router: Running, start_worker: StartWorker) -> None:
    worker = await start_worker(answer_by_path)
    await router.add(worker)
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    trace = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01", "tracestate": "a=1,b=2"}
    headers = {"x-request-id": "mine-1", **trace}
    with capture_logs() as lines:
        async with router.http.post(f"{router.url}/v1/completions?key=SECRET", headers=headers, data=b"{}") as answer:
            assert answer.status == 500 and answer.headers["x-request-id"] == "mine-1"
    [line] = [line for line in lines if line.get("request_id") == "mine-1"]
    assert (line["event"], line["trace_id"], line["path"]) == ("request_failed", trace_id, "/v1/completions")
    assert "SECRET" not in str(line)
    for name, value in headers.items():
        assert worker.requests[0].header(name.encode()) == [value.encode()]


async def test_scrape_is_compressed_when_asked(router: Running) -> None:
    headers = {"accept-encoding": "gzip"}
    async with router.http.get(f"{router.url}/metrics", headers=headers) as answer:
        assert answer.headers["content-encoding"] == "gzip" and answer.headers["vary"] == "Accept-Encoding"
        assert read(gzip.decompress(await answer.read()).decode())


@pytest.mark.tools
async def test_prometheus_under_load_shows_what_workers_counted(
    router: Running, start_worker: StartWorker, tmp_path: Path
) -> None:
    workers = [await start_worker(answer_by_path) for _ in range(3)]
    for worker in workers:
        await router.add(worker)
    with prometheus_scraping(tmp_path, router.url) as query:

        async def wait_for(text: str, wanted: dict[str, float], label: str) -> None:
            def shown() -> dict[str, float]:
                return {one["metric"].get(label, ""): float(one["value"][1]) for one in query(text)}

            await asyncio.to_thread(until, lambda: shown() == wanted, f"{text} to be {wanted}", limit_s=60)

        await wait_for("up", {"f": 1}, "job")
        for _ in range(10):
            await ask(router, "/generate", count=100)
            await ask(router, "/v1/completions", count=10)
        truth = {w.url: float(n) for w, n in zip(workers, num_seen(workers, b"/generate"), strict=True)}
        assert sum(truth.values()) == 1000
        await wait_for('furlong_router_worker_requests_total{path_class="generate",status="200"}', truth, "worker")
        await wait_for('sum(furlong_router_requests_total{status="500"})', {"": 100}, "")
        await wait_for(
            'furlong_router_request_seconds_count{path_class!~"metrics|control"}',
            {"generate": 1000, "completions": 100},
            "path_class",
        )
        [found] = await asyncio.to_thread(
            query, 'histogram_quantile(0.5, furlong_router_request_seconds_bucket{path_class="generate"})'
        )
        assert 0 < float(found["value"][1]) < 5
        await wait_for("count(furlong_router_build_info)", {"": 1}, "")
