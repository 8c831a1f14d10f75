"""The token: what it opens, how it is read, that it leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import pytest
import structlog

from furlong import rpc
from furlong.config import ConfigError
from furlong.v1 import router_pb2 as pb
from furlong.v1.router_pb2_grpc import RouterStub
from services.router.control.token import Token
from tests.router.conftest import StartRouter, StartWorker
from tests.router.control.calling import call
from tests.router.raw_client import exchange, get, post

if TYPE_CHECKING:  # the stubs' own name for a stub of an asyncio channel; it has no value
    from furlong.v1.router_pb2_grpc import RouterAsyncStub

FIRST = "first-token-of-all"
SECOND = "second-token-of-all"


def headers(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {token}".encode())]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{FIRST}\n")
    return path


def test_only_the_token_is_allowed(file: Path) -> None:
    token = Token(str(file))
    assert token.needed and token.allows(headers(FIRST))
    assert token.allows([(b"authorization", f"bearer  {FIRST} ".encode())])
    for wrong in ("", FIRST[:-1], FIRST + "x", FIRST.upper(), "\u00e9"):
        assert not token.allows(headers(wrong))
    assert not token.allows([])
    assert not token.allows([(b"authorization", FIRST.encode())])
    for scheme in ("Basic", "Digest"):
        assert not token.allows([(b"authorization", f"{scheme} {FIRST}".encode())])
    assert not token.allows(headers(FIRST) * 2)


def test_without_a_file_nothing_is_needed_and_nothing_is_the_token() -> None:
    token = Token("")
    assert not token.needed and token.allows([]) and not token.is_in(b"Bearer ")


def test_a_new_file_counts_at_once_and_the_old_token_no_longer(file: Path) -> None:
    token = Token(str(file))
    new = file.with_name("new")
    new.write_text(SECOND)
    new.replace(file)
    assert token.allows(headers(SECOND)) and not token.allows(headers(FIRST))


@pytest.mark.parametrize("damage", ["", "two words", None])
def test_a_file_gone_bad_leaves_the_old_token_in_force(file: Path, damage: str | None) -> None:
    token = Token(str(file))
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage)
    assert token.allows(headers(FIRST)) and not token.allows(headers(""))


def test_a_file_gone_bad_is_told_once_and_not_for_each_request(file: Path) -> None:
    token = Token(str(file))
    with structlog.testing.capture_logs() as lines:
        for content in ("two words", FIRST, "two words"):
            file.write_text(content)
            for _ in range(3):
                assert token.allows(headers(FIRST))
    assert [line["event"] for line in lines] == ["router_token_kept", "router_token_kept"]


@pytest.mark.parametrize("content", ["", " \n", "two words", "two\nlines", "\u00e9", "x" * 5000])
def test_a_bad_file_is_a_clear_error_at_start(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"--router-token-file.*\. Write one line"):
        Token(str(file))


def test_a_missing_file_is_a_clear_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Token(str(tmp_path / "none"))


def test_the_token_is_not_shown(file: Path) -> None:
    assert FIRST not in f"{Token(str(file))!r}{Token(str(file))}"


def test_what_goes_on_to_a_worker_lacks_the_token_alone(file: Path) -> None:
    token = Token(str(file))
    others = [(b"authorization", b"Bearer sk-user"), (b"x-a", FIRST.encode())]
    assert token.without([*headers(FIRST), *others]) == others


async def test_control_needs_the_token_and_health_does_not(
    start_router: StartRouter, start_worker: StartWorker, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router(token_file=str(file))
    worker = await start_worker()
    for method, path in (
        ("POST", "/workers"),
        ("GET", "/workers"),
        ("GET", "/workers/x"),
        ("DELETE", "/workers/x"),
        ("POST", "/add_worker"),
        ("GET", "/list_workers"),
        ("GET", "/router/metrics"),
        ("POST", "/flush_cache"),
        ("POST", "/pause_generation"),
        ("POST", "//workers"),
        ("GET", "/router/nothing"),
    ):
        for sent in ({}, {"Authorization": f"Bearer {SECOND}"}):
            async with router.http.request(method, router.url + path, headers=sent) as answer:
                assert answer.status == 401, (method, path)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert (await answer.json())["error"]["type"] == "unauthorized"
    allowed = {"Authorization": f"Bearer {FIRST}"}
    assert (await call(router, "POST", "/workers", {"url": worker.url}, **allowed))[0] == 202
    for path in (b"/healthz", b"/router/openapi.json"):
        assert (await exchange(router.port, get(path))).status == 200
    assert (await exchange(router.port, get(b"/readyz"))).status in (200, 503)
    assert FIRST not in caplog.text


async def test_generation_needs_no_token(start_router: StartRouter, start_worker: StartWorker, file: Path) -> None:
    router = await start_router(token_file=str(file))
    router.http.headers["Authorization"] = f"Bearer {FIRST}"
    worker = await start_worker()
    await router.add(worker)
    assert (await exchange(router.port, post(b"/generate"))).status == 200
    assert (await exchange(router.port, post(b"/abort_request", b'{"rid":"x"}'))).status == 200


async def test_grpc_needs_the_token(start_router: StartRouter, file: Path) -> None:
    router = await start_router(token_file=str(file))
    request = pb.ListWorkersRequest()
    async with rpc.aio_channel(router.grpc) as channel:
        stub = cast("RouterAsyncStub", RouterStub(channel))
        for metadata in (None, (("authorization", f"Bearer {SECOND}"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListWorkers(request, timeout=5, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(stub.WatchWorkers(pb.WatchWorkersRequest(), timeout=5, metadata=metadata)))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        allowed = (("authorization", f"Bearer {FIRST}"),)
        assert list((await stub.ListWorkers(request, timeout=5, metadata=allowed)).workers) == []
