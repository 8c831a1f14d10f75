"""OpenAI's Python client through the router."""

from pathlib import Path

import openai
import pytest
from yarl import URL

from services.router.workers.workers import State
from tests.router.conftest import Running, StartRouter, StartWorker
from tests.router.control.engine import Engine
from tests.router.fake_worker import Seen

SAID = "one two three"
MESSAGES = [{"role": "user", "content": "count"}]


def client_of(router: Running, *, key: str = "sk-user") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key, timeout=10, max_retries=0)


async def test_models(router: Running, start_worker: StartWorker) -> None:
    for _ in range(2):
        await router.add(await start_worker(Engine()))
    async with client_of(router) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_chat(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker(Engine()))
    async with client_of(router) as client:
        said = await client.chat.completions.create(model="tiny", messages=MESSAGES)  # pyrefly: ignore
        assert said.choices[0].message.content == SAID and said.usage is not None and said.usage.total_tokens == 4


async def test_streamed_chat(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker(Engine()))
    async with client_of(router) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # pyrefly: ignore
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["one", " two", " three"]


async def test_completions_plain_and_streamed(router: Running, start_worker: StartWorker) -> None:
    await router.add(await start_worker(Engine()))
    async with client_of(router) as client:
        said = await client.completions.create(model="tiny", prompt="count")
        assert said.choices[0].text == SAID
        stream = await client.completions.create(model="tiny", prompt="count", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == SAID


async def test_an_engines_error_is_the_clients_error(router: Running, start_worker: StartWorker) -> None:
    body = b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}'

    async def refuse(seen: Seen) -> None:
        await seen.answer(body, status=b"400 Bad Request", extra=b"content-type: application/json\r\n")

    await router.add(await start_worker(refuse))
    async with client_of(router) as client:
        with pytest.raises(openai.BadRequestError, match="too long"):
            await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # pyrefly: ignore


async def test_no_worker_is_an_error_that_the_client_would_try_again(start_router: StartRouter) -> None:
    router = await start_router(queue_timeout_s=0.1)
    async with client_of(router) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="tiny", prompt="count")
    assert caught.value.status_code == 503 and "retry-after" in caught.value.response.headers


async def test_a_users_key_reaches_the_engine_and_the_routers_token_does_not(
    start_router: StartRouter, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("t0ken-of-the-router")
    router = await start_router(token_file=str(tmp_path / "token"))
    router.http.headers["Authorization"] = "Bearer t0ken-of-the-router"
    engine = Engine()
    await router.add(await start_worker(engine))
    for key in ("sk-user", "t0ken-of-the-router"):
        async with client_of(router, key=key) as client:
            await client.completions.create(model="tiny", prompt="count")
    assert engine.authorizations == [b"Bearer sk-user"]


async def test_the_routers_key_for_an_engine_opens_generation_and_not_where_the_engine_shows_it(
    router: Running, start_worker: StartWorker
) -> None:
    engine = Engine()
    worker = await start_worker(engine)
    async with router.http.post(f"{router.url}/workers", json={"url": worker.url, "api_key": "k3y"}) as answer:
        await router.until_state((await answer.json())["id"], State.READY)
    async with client_of(router) as client:
        await client.completions.create(model="tiny", prompt="count")
    for path in ("/server_info", "/get_server_info", "//server_info", "/%73erver_info"):
        async with router.http.get(URL(router.url + path, encoded=True)) as answer:
            await answer.read()
    async with router.http.get(f"{router.url}/server_info", headers={"Authorization": "Bearer own"}) as answer:
        assert answer.status == 200
    assert engine.authorizations == [b"Bearer k3y", b"Bearer own"]
