"""HTTPS on both sides: served with an own certificate, and workers that have to prove who they are."""

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest

from services.router.workers.workers import State
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.fake_worker import FakeWorker, Seen, wait_gone
from tests.router.http.certificates import Authority
from tests.router.waiting import eventually


class TlsWorker(FakeWorker):
    """A fake worker behind TLS."""

    def __init__(self, authority: Authority, host: str) -> None:
        super().__init__()
        made = authority.issue(host)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(made.cert, made.key)
        self.names: list[str | None] = []
        self.context.sni_callback = lambda _, name, __: self.names.append(name)

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}"

    async def start(self) -> "TlsWorker":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self.context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


async def test_https_is_served(start_router: StartRouter, start_worker: StartWorker, authority: Authority) -> None:
    made = authority.issue("127.0.0.1")
    router = await start_router(tls_cert=str(made.cert), tls_key=str(made.key))
    assert router.url.startswith("https://")
    worker = await start_worker()
    router.listening.router.add(worker.url, admit=True)
    await router.until_state(worker.url, State.READY)
    context = ssl.create_default_context(cafile=str(authority.path))
    body = b"x" * 3_000_000
    async with aiohttp.ClientSession() as http:
        for _ in range(3):
            async with http.post(f"{router.url}/generate", data=body, ssl=context) as answer:
                assert answer.status == 200 and await answer.json() == {"text": "ok"}
        async with http.get(f"{router.url}/healthz", ssl=context) as answer:
            assert answer.status == 200
    assert [seen.body for seen in worker.requests] == [body] * 3


async def test_a_tls_client_that_leaves_takes_its_request_with_it(
    start_router: StartRouter, start_worker: StartWorker, authority: Authority
) -> None:
    made = authority.issue("127.0.0.1")
    router = await start_router(tls_cert=str(made.cert), tls_key=str(made.key))
    worker = await start_worker(wait_gone)
    router.listening.router.add(worker.url, admit=True)
    await router.until_state(worker.url, State.READY)
    context = ssl.create_default_context(cafile=str(authority.path))
    _, writer = await asyncio.open_connection("127.0.0.1", router.port, ssl=context)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
    seen = (await worker.arrived())[0]
    writer.close()
    async with asyncio.timeout(0.5):
        await seen.gone.wait()


async def test_a_plain_client_at_a_tls_port_and_a_bad_handshake_harm_nobody(
    start_router: StartRouter, authority: Authority
) -> None:
    made = authority.issue("127.0.0.1")
    router = await start_router(tls_cert=str(made.cert), tls_key=str(made.key), client_head_timeout_s=0.3)
    for said in (b"GET / HTTP/1.1\r\nhost: r\r\n\r\n", b""):
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(said)
            try:
                await reader.read(-1)
            except ConnectionError:
                pass
            writer.close()
    context = ssl.create_default_context(cafile=str(authority.path))
    async with aiohttp.ClientSession() as http, http.get(f"{router.url}/healthz", ssl=context) as answer:
        assert answer.status == 200


async def add_tls_worker(router: Running, authority: Authority, *, certified: str, host: str) -> TlsWorker:
    worker = await TlsWorker(authority, certified).start()
    worker.host = host
    router.listening.router.add(worker.url, admit=True)
    return worker


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_an_https_worker_is_trusted_by_the_given_authority(
    start_router: StartRouter, authority: Authority, host: str
) -> None:
    router = await start_router(worker_ca=str(authority.path))
    worker = await add_tls_worker(router, authority, certified=host, host=host)
    await router.until_state(worker.url, State.READY)
    for _ in range(3):
        async with router.http.post(f"{router.url}/generate", data=b"y" * 500_000) as answer:
            assert answer.status == 200
    assert [len(seen.body) for seen in worker.requests] == [500_000] * 3
    assert set(worker.names) == {host if host == "localhost" else None}
    await worker.die()


@pytest.mark.parametrize(("ca", "certified"), [("", "localhost"), ("other", "localhost"), ("own", "elsewhere.test")])
async def test_an_https_worker_that_is_not_trusted_gets_nothing(
    start_router: StartRouter, authority: Authority, tmp_path: Path, ca: str, certified: str
) -> None:
    """Signed by nobody known, by another authority, or for another host."""
    other = Authority(tmp_path, "other")
    paths = {"": "", "other": str(other.path), "own": str(authority.path)}
    router = await start_router(worker_ca=paths[ca], queue_timeout_s=0.5)
    worker = await add_tls_worker(router, authority, certified=certified, host="localhost")
    found = router.listening.router.workers.find(worker.url)
    assert found is not None
    await eventually(lambda: "TLS" in found.last_error, "the probe was refused by TLS")
    async with router.http.post(f"{router.url}/generate", json={}) as answer:
        assert answer.status == 503
    assert worker.requests == [] and worker.probes == []
    await worker.die()


async def test_an_https_worker_that_cuts_its_answer_is_told(start_router: StartRouter, authority: Authority) -> None:
    async def cut(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        seen.writer.close()

    router = await start_router(worker_ca=str(authority.path))
    worker = await add_tls_worker(router, authority, certified="localhost", host="localhost")
    worker.handler = cut
    await router.until_state(worker.url, State.READY)
    async with router.http.post(f"{router.url}/generate", json={}) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await worker.die()
