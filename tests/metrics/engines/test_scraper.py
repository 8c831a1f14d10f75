"""Endpoints are read for what they say: rates over their own time, resets seen, the dead and the endless survived."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from furlong.config.destinations import scrape_problems
from furlong.records import Mean, Value
from services.metrics.engines.exposition import parse, values
from services.metrics.engines.scraper import Scraper, read_endpoint
from services.metrics.tailing.tailer import Sample

RECORDED = Path(__file__).with_name("sglang_0_5_23.prom").read_text()


def number(value: Value) -> float:
    assert isinstance(value, Mean)
    return value.sum / value.count


def between(first: str, second: str, took_s: float = 10.0) -> dict[str, float]:
    """The values of two readings."""
    row = values(parse(second, 100.0 + took_s), parse(first, 100.0))
    return {name: number(value) for name, value in row.items()}


def test_counter_is_a_rate() -> None:
    text = '# TYPE sglang:tokens_total counter\nsglang:tokens_total{{model_name="m"}} {}\n'
    assert between(text.format(100), text.format(150)) == {"tokens_per_s": 5.0}


def test_counter_that_began_anew_counts_from_zero() -> None:
    text = "# TYPE tokens_total counter\ntokens_total {}\n"
    assert between(text.format(1000), text.format(20)) == {"tokens_per_s": 2.0}


def test_process_that_is_gone_or_new_makes_no_rate_of_what_another_counted() -> None:
    text = '# TYPE t_total counter\nt_total{{pid="1"}} {}\nt_total{{pid="{}"}} {}\n'
    assert between(text.format(1_000_000, 2, 2_000_000), text.format(1_000_100, 3, 50)) == {"t_per_s": 15.0}
    alone = '# TYPE t_total counter\nt_total{pid="1"} 1000100\n'
    assert between(text.format(1_000_000, 2, 2_000_000), alone) == {"t_per_s": 10.0}


def test_histograms_of_two_processes_begin_anew_each_on_its_own() -> None:
    text = (
        '# TYPE h histogram\nh_count{{pid="1"}} {}\nh_sum{{pid="1"}} {}\nh_count{{pid="2"}} {}\nh_sum{{pid="2"}} {}\n'
    )
    row = between(text.format(10, 5.0, 900, 900.0), text.format(14, 13.0, 1, 2.0))
    assert row == {"h_count_per_s": 0.5, "h_sum_per_s": 1.0, "h_mean": 2.0}


def test_gauges_of_two_processes_hide_neither() -> None:
    text = '# TYPE g gauge\ng{pid="1"} 5\ng{pid="2"} 7\n'
    assert parse(text, 1.0).gauges == {"g{pid=1}": 5.0, "g{pid=2}": 7.0}


def test_first_reading_has_gauges_only() -> None:
    text = "# TYPE g gauge\ng 3\n# TYPE tokens_total counter\ntokens_total 9\n"
    assert values(parse(text, 1.0), None) == {"g": Mean(3.0, 1)}


def test_histogram_is_rates_and_the_mean_of_what_is_new() -> None:
    text = '# TYPE h histogram\nh_bucket{{le="1"}} 1\nh_bucket{{le="+Inf"}} {0}\nh_sum {1}\nh_count {0}\n'
    row = between(text.format(10, 5.0), text.format(14, 13.0))
    assert row == {"h_count_per_s": 0.4, "h_sum_per_s": 0.8, "h_mean": 2.0}


def test_histogram_without_news_has_no_mean() -> None:
    text = '# TYPE h histogram\nh_bucket{le="+Inf"} 4\nh_sum 5\nh_count 4\n'
    assert between(text, text) == {"h_count_per_s": 0.0, "h_sum_per_s": 0.0}


def test_labels_that_tell_series_apart_stand_in_the_name() -> None:
    text = '# TYPE g gauge\ng{tp_rank="0",model_name="m"} 1\ng{tp_rank="1"} 2\ng{endpoint="/x",method="GET"} 3\n'
    assert set(values(parse(text, 1.0), None)) == {"g", "g{tp_rank=1}", "g{endpoint=/x,method=GET}"}


def test_recorded_endpoint_of_sglang_is_read() -> None:
    row = values(parse(RECORDED, 110.0), parse("# TYPE x gauge\nx 1\n", 100.0))
    assert number(row["max_total_num_tokens"]) == 16384.0
    assert number(row["cache_hit_rate"]) == 0.9
    rates = values(parse(RECORDED, 110.0), parse(RECORDED, 100.0))
    assert number(rates["http_requests_per_s{endpoint=/generate,method=POST}"]) == 0.0
    assert len(rates) < 500


@pytest.mark.parametrize(
    ("given", "instance", "url"),
    [
        ("http://h:1", "h:1", "http://h:1/metrics"),
        ("http://h:1/x?a=b", "h:1", "http://h:1/x?a=b"),
        ("engine-0=http://h:1/metrics", "engine-0", "http://h:1/metrics"),
    ],
)
def test_endpoint_has_a_name_and_a_path(given: str, instance: str, url: str) -> None:
    endpoint = read_endpoint(given)
    assert (endpoint.instance, endpoint.url) == (instance, url)


@pytest.mark.parametrize("url", ["h:1", "ftp://h/x", "http://", "http://user:secret@h/metrics"])
def test_wrong_url_is_refused_without_its_secret(url: str) -> None:
    (problem,) = scrape_problems([url])
    assert "secret" not in str(problem)


class World:
    """An endpoint whose answers are ours."""

    def __init__(self) -> None:
        self.answers: list[web.StreamResponse] = []
        self.url = ""
        self.samples: list[Sample] = []
        self.came = asyncio.Event()

    def take(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) == 2:
            self.came.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.answers:
            return web.Response(text="# TYPE g gauge\ng 1\n")
        answer = self.answers.pop(0)
        if answer.headers.get("X-Endless"):
            await answer.prepare(request)
            for _ in range(40):
                await answer.write(b"# " + b"x" * 1_000_000 + b"\n")
        return answer


@asynccontextmanager
async def world() -> AsyncGenerator[World]:
    made = World()
    app = web.Application()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await made.answer(request)

    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    made.url = f"http://{host}:{port}"
    try:
        yield made
    finally:
        await runner.cleanup()


async def test_bad_answers_are_counted_said_once_and_forgotten_when_it_is_back() -> None:
    async with world() as w, aiohttp.ClientSession() as session:
        scraper = Scraper([w.url], interval_s=1.0, take=w.samples.append)
        (endpoint,) = scraper.endpoints
        w.answers += [
            web.Response(status=500),
            web.Response(text="g{ 1"),
            web.StreamResponse(headers={"X-Endless": "1"}),
        ]
        with capture_logs() as logs:
            for _ in range(3):
                assert not await scraper.read_once(session, endpoint)
            assert "more than" in endpoint.failing
            assert await scraper.read_once(session, endpoint)
        assert [entry["event"] for entry in logs] == ["scrape_failed", "scrape_back"]
        assert (endpoint.num_failures, endpoint.num_readings, endpoint.failing) == (3, 1, "")
        assert [sample.values for sample in w.samples] == [{"g": Mean(1.0, 1)}]


async def test_redirect_is_not_followed() -> None:
    async with world() as w, aiohttp.ClientSession() as session:
        w.answers.append(web.Response(status=302, headers={"Location": w.url + "/metrics"}))
        scraper = Scraper([w.url], interval_s=1.0, take=w.samples.append)
        assert not await scraper.read_once(session, scraper.endpoints[0])


async def test_dead_endpoint_does_not_hold_up_another() -> None:
    async with world() as w:
        scraper = Scraper(["dead=http://127.0.0.1:9", w.url], interval_s=1.0, take=w.take)
        tasks: list[asyncio.Task[object]] = []
        async with scraper.running(tasks.append):
            await asyncio.wait_for(w.came.wait(), 10)
        assert scraper.endpoints[0].num_failures >= 1
        assert all(task.cancelled() for task in tasks)


async def test_slow_endpoint_is_given_up_within_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as w:
        held = asyncio.Event()

        async def hold(request: web.Request) -> web.StreamResponse:
            await held.wait()
            return web.Response()

        monkeypatch.setattr(w, "answer", hold)
        scraper = Scraper([w.url], interval_s=1.0, take=w.samples.append)
        async with aiohttp.ClientSession(timeout=scraper.timeout) as session, asyncio.timeout(1.0):
            assert not await scraper.read_once(session, scraper.endpoints[0])
        held.set()
