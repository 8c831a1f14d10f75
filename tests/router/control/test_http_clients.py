"""Other HTTP clients through the router: requests, httpx, aiohttp, and curl with HTTP/1.0."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator

import aiohttp
import httpx
import pytest
import requests

from tests.router.conftest import Running, StartWorker
from tests.router.control.engine import Engine
from tests.router.fake_worker import Seen

ASKED = {"model": "tiny", "prompt": "count"}
SAID = "one two three"
BODY = b"0123456789" * 50_000


async def echo(seen: Seen) -> None:
    await seen.answer(seen.body)


@pytest.fixture
async def url(router: Running, start_worker: StartWorker) -> str:
    """Of a completion by a router with one engine."""
    await router.add(await start_worker(Engine()))
    return f"{router.url}/v1/completions"


def test_nothing_here_is_skipped_for_want_of_curl() -> None:
    assert shutil.which("curl"), "install curl: the tests of the router use it"


async def test_requests(url: str) -> None:
    def client() -> tuple[str, list[bytes]]:
        with requests.Session() as session:
            plain = session.post(url, json=ASKED, timeout=5).json()["choices"][0]["text"]
            with session.post(url, json={**ASKED, "stream": True}, stream=True, timeout=5) as answer:
                return plain, [line for line in answer.iter_lines() if line]

    plain, lines = await asyncio.to_thread(client)
    assert plain == SAID and len(lines) == 4 and lines[-1] == b"data: [DONE]"


async def test_httpx(url: str) -> None:
    async with httpx.AsyncClient(timeout=5) as client:
        assert (await client.post(url, json=ASKED)).json()["choices"][0]["text"] == SAID
        async with client.stream("POST", url, json={**ASKED, "stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    assert len(lines) == 4 and lines[-1] == "data: [DONE]"


async def test_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as session:
        async with session.post(url, json=ASKED) as answer:
            assert (await answer.json())["choices"][0]["text"] == SAID
        async with session.post(url, json={**ASKED, "stream": True}) as answer:
            assert [line async for line in answer.content if line.strip()][-1] == b"data: [DONE]\n"


async def test_bodies_of_unknown_length(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker(echo))

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(BODY), 7_000):
            yield BODY[at : at + 7_000]

    async def later() -> AsyncIterator[bytes]:
        for piece in pieces():
            yield piece

    target = f"{router.url}/anything"
    assert (await asyncio.to_thread(requests.post, target, data=pieces(), timeout=5)).content == BODY
    async with httpx.AsyncClient(timeout=5) as client:
        assert (await client.put(target, content=later())).content == BODY
    async with router.http.patch(target, data=later()) as answer:
        assert await answer.read() == BODY


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_curl(url: str, version: str, *, streamed: bool) -> None:
    asked = '{"model":"tiny","prompt":"count","stream":%s}' % str(streamed).lower()  # noqa: UP031  it is full of braces
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "-N", "--max-time", "5", version, "-d", asked, url, stdout=-1, stderr=-1
    )
    said, problems = await process.communicate()
    assert process.returncode == 0 and problems == b""
    if streamed:
        assert said.count(b"data: ") == 4 and said.endswith(b"data: [DONE]\n\n")
    else:
        assert SAID.encode() in said


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1"])
async def test_curl_registers(router: Running, start_worker: StartWorker, version: str) -> None:
    worker = await start_worker()
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "5", version, "-w", "%{http_code}", "-o", "/dev/null",
        "-d", f'{{"url": "{worker.url}"}}', f"{router.url}/workers", stdout=-1,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert said == b"202" and len(await router.views()) == 1
