"""SGLang itself behind the router: clients get byte for byte what it sends, and it sends what it does directly.

The first is seen on the wire between the two. For the second, what SGLang makes new for each request (ids, times) is
found by asking it the same twice, and only that is left out; so is how it groups tokens to events, which goes by time.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests import tools
from tests.rollout.engine.tiny_model import make_checkpoint
from tests.router.conftest import Running, StartRouter
from tests.router.raw_client import RawAnswer, exchange, get, post
from tests.router.waiting import eventually
from tests.sglang_environment import MISSING, find_sglang

SGLANG = find_sglang()
START_LIMIT_S = 300.0
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_LIMIT_S),
    pytest.mark.skipif(SGLANG is None, reason=MISSING),
]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say é and 7"}], "temperature": 0, "max_tokens": 8}
COMPLETION = {"model": "tiny", "prompt": ["1+1="], "temperature": 0, "max_tokens": 8, "logprobs": 2}
CASES: dict[str, bytes] = {}


def json_post(path: str, content: object) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return post(path.encode(), body, extra=b"content-type: application/json\r\n")


def case(name: str, path: str, content: object) -> None:
    CASES[name] = json_post(path, content)


case("generate", "/generate", {"text": "1+1=", "sampling_params": GREEDY})
case("generate by query", "/generate?a=1&a=2", {"text": "1+1=", "sampling_params": GREEDY})
case("logprobs", "/generate", {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "return_logprob": True})
case("two of one", "/generate", {"text": ["1+1=", "a"], "sampling_params": {**GREEDY, "n": 2}})
case("stream", "/generate", {"text": "1+1=", "sampling_params": GREEDY, "stream": True})
case("completions", "/v1/completions", COMPLETION)
case("completions stream", "/v1/completions", {**COMPLETION, "prompt": "1+1=", "stream": True})
case("chat", "/v1/chat/completions", CHAT)
case("chat stream", "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}})
case("tokenize", "/v1/tokenize", {"model": "tiny", "prompt": "a é"})
case("no JSON", "/generate", b"{")
case("nothing asked", "/generate", {})
case("bad parameter", "/generate", {"text": "a", "sampling_params": {"temperature": -1}})
case("too long", "/generate", {"input_ids": [5] * 5000, "sampling_params": GREEDY})
case("bad chat", "/v1/chat/completions", {"model": "tiny", "messages": "no list"})
case("no such path", "/v1/nothing", {})
CASES["wrong method"] = get(b"/generate", method=b"DELETE")
CASES["head"] = get(b"/v1/completions", method=b"HEAD")


@dataclass(frozen=True)
class Sglang:
    """A server that answers."""

    url: str
    port: int


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    assert SGLANG is not None
    folder = tmp_path_factory.mktemp("sglang")
    model, port = make_checkpoint(folder / "model", seed=1, kind="qwen3"), tools.free_port()
    start = [SGLANG.launcher] if SGLANG.launcher else ["-m", "sglang.launch_server"]
    flags = {"model-path": model, "device": "cpu", "host": "127.0.0.1", "port": port, "max-total-tokens": 16384}
    flags |= {"dtype": "float32", "served-model-name": "tiny", "random-seed": 1, "chat-template": "chatml"}
    command = [SGLANG.python, *start, *(f"--{name}={value}" for name, value in flags.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        asyncio.run(until_answers(f"http://127.0.0.1:{port}", process, folder / "log"))
        yield Sglang(f"http://127.0.0.1:{port}", port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


async def until_answers(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(START_LIMIT_S):
        while True:
            assert process.poll() is None, f"SGLang ended; see {log}"
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(f"{url}/generate", json={"text": "a", "sampling_params": GREEDY}) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)


class Wire:
    """Between router and SGLang: passes bytes on and keeps what SGLang answered, by what it was asked."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._seen: list[tuple[bytearray, bytearray]] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker_reader, worker_writer = await asyncio.open_connection("127.0.0.1", self._to)
        asked, answered = bytearray(), bytearray()
        self._seen.append((asked, answered))
        up = asyncio.create_task(self._pass(reader, worker_writer, asked))
        await self._pass(worker_reader, writer, answered)
        up.cancel()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):  # cancelled: the test is over
            while data := await reader.read(65536):
                kept += data
                writer.write(data)
        writer.close()

    def forget(self) -> None:
        for asked, answered in self._seen:
            asked.clear()
            answered.clear()

    def answer_to(self, request: bytes) -> RawAnswer:
        """The one answer to that since `forget`."""
        line = request.split(b"\r\n")[0]
        (found,) = [bytes(answered) for asked, answered in self._seen if asked.startswith(line)]
        head, _, body = found.partition(b"\r\n\r\n")
        return RawAnswer(int(head.split(b" ")[1]), head, body)


@pytest.fixture(params=[{}, {"max_in_flight": 1, "max_tries": 3}], ids=["default", "limited"])
async def before_sglang(
    request: pytest.FixtureRequest, start_router: StartRouter, wire: tuple[Wire, str]
) -> AsyncIterator[Running]:
    router = await start_router(**request.param)
    async with router.http.post(f"{router.url}/workers", json={"url": wire[1]}) as answer:
        assert answer.status < 300
    workers = router.listening.router.workers
    await eventually(lambda: workers.num_ready() == 1, "SGLang is ready")
    yield router


@pytest.fixture
async def wire(sglang: Sglang) -> AsyncIterator[tuple[Wire, str]]:
    wire = Wire(sglang.port)
    server = await asyncio.start_server(wire.connected, "127.0.0.1", 0)
    yield wire, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.fixture(scope="module")
def new_each_time(sglang: Sglang) -> set[str]:
    """Keys that SGLang fills anew: what differs between answers to the same, asked at different times."""

    async def twice(name: str) -> set[str]:
        answers = []
        for _ in range(3):  # what is cached is the same for the second and the third
            answers.append(await exchange(sglang.port, CASES[name], timeout_s=60))
            await asyncio.sleep(1.1)  # times of the OpenAI paths are whole seconds
        return differing_keys(*answers[1:])

    async def of_all() -> set[str]:
        found: set[str] = set()
        for name in ("generate", "completions", "chat"):  # by turns: a batch changes the last digits of logprobs
            found |= await twice(name)
        return found

    return asyncio.run(of_all())


def test_only_ids_and_times_are_new_each_time(new_each_time: set[str]) -> None:
    assert new_each_time == {"id", "created", "e2e_latency", "response_sent_to_client_ts"}


@pytest.mark.parametrize("name", CASES)
async def test_answer_is_sglangs_own(
    sglang: Sglang, before_sglang: Running, wire: tuple[Wire, str], new_each_time: set[str], name: str
) -> None:
    await exchange(sglang.port, CASES[name], timeout_s=60)  # so that what it caches is the same for all that follow
    direct = await exchange(sglang.port, CASES[name], timeout_s=60)
    wire[0].forget()
    routed = await exchange(before_sglang.port, CASES[name], timeout_s=60)
    sent = wire[0].answer_to(CASES[name])
    assert (routed.status, body_of(routed)) == (sent.status, body_of(sent))
    assert headers_of(routed) == headers_of(sent)
    assert without(routed, new_each_time) == without(direct, new_each_time)
    leave_out = b"" if name in ("no JSON", "head", "wrong method") else b"content-length"
    assert headers_of(routed, but=leave_out) == headers_of(direct, but=leave_out)


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_through_the_router_ends_the_request_as_it_does_directly(
    sglang: Sglang, before_sglang: Running, stream: bool
) -> None:
    ends = []
    for port, name in ((sglang.port, "direct"), (before_sglang.port, "routed")):
        rid = f"{name}-{stream}-{os.urandom(4).hex()}"
        parameters = {**GREEDY, "max_new_tokens": 1900}
        asked = {"text": "a", "sampling_params": parameters, "rid": rid, "stream": stream}
        victim = asyncio.create_task(exchange(port, json_post("/generate", asked), timeout_s=60))
        await asyncio.sleep(0.3)  # it is running by then; an abort of what has not come yet aborts nothing
        done = await exchange(port, json_post("/abort_request", {"rid": rid}))
        assert done.status == 200
        answer = await victim
        said = [json.loads(part) for part in parts_of(answer)]
        ends.append((answer.status, said[-1]["meta_info"]["finish_reason"], sorted(said[-1]["meta_info"])))
        assert said[-1]["meta_info"]["completion_tokens"] < 1900
    assert ends[0] == ends[1]


async def test_sglang_aborts_what_a_client_of_the_router_has_left(sglang: Sglang, before_sglang: Running) -> None:
    asked = {"text": "a", "sampling_params": {**GREEDY, "max_new_tokens": 2000}, "stream": True}
    _, writer = await asyncio.open_connection("127.0.0.1", before_sglang.port)
    writer.write(json_post("/generate", asked))
    await asyncio.sleep(0.2)
    writer.transport.abort()
    workers = before_sglang.listening.router.workers
    await eventually(lambda: workers.all()[0].in_flight == 0, "the router let it go", timeout_s=2)


def body_of(answer: RawAnswer) -> bytes:
    """Without the framing."""
    if answer.header(b"transfer-encoding") != [b"chunked"]:
        return answer.body
    body, rest = b"", answer.body
    while True:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        if not size:
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[:size], rest[size + 2 :]


def parts_of(answer: RawAnswer) -> list[bytes]:
    """The JSON texts of an answer: its body, or the events of a stream."""
    body = body_of(answer)
    if not body.startswith(b"data: "):
        return [body] if body else []
    return [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part not in (b"", b"data: [DONE]")]


def differing_keys(first: RawAnswer, second: RawAnswer) -> set[str]:
    """Keys whose values are not the same in both."""
    keys: set[str] = set()

    def compare(one: object, other: object, key: str) -> None:
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            for name in one:
                compare(one[name], other[name], name)
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            for left, right in zip(one, other, strict=True):
                compare(left, right, key)
        elif one != other:
            keys.add(key)

    for left, right in zip(parts_of(first), parts_of(second), strict=True):
        compare(json.loads(left), json.loads(right), "")
    return keys


def without(answer: RawAnswer, keys: set[str]) -> tuple[int, bytes]:
    """Status and body, but for the values of those keys; of a stream what it said in all, and how it ended."""
    body = body_of(answer)
    if body.startswith(b"data: "):
        return answer.status, said_in_all(answer).encode()
    for key in keys:
        body = re.sub(rb'("%s": ?)("[^"]*"|[-0-9.e+]+)' % key.encode(), rb"\1*", body)
    return answer.status, body


def said_in_all(answer: RawAnswer) -> str:
    """The text of a stream and its end; SGLang puts as many tokens into an event as there are by then."""
    said, ends = "", []
    for event in map(json.loads, parts_of(answer)):
        if "text" in event:  # its own path tells all that was said so far
            said, ends = event["text"], [event["meta_info"]["finish_reason"]]
        for choice in event.get("choices", ()):
            said += choice.get("text") or choice.get("delta", {}).get("content") or ""
            ends.append(choice["finish_reason"])
    assert body_of(answer).endswith(b"data: [DONE]\n\n")
    return f"{said!r} {ends[-1]}"


def headers_of(answer: RawAnswer, *, but: bytes = b"") -> list[tuple[bytes, bytes]]:
    """The worker's: not the date, nor what the router says of the connection and of the request."""
    lines = (line.partition(b":") for line in answer.head.split(b"\r\n")[1:])
    pairs = ((name.lower(), value.strip()) for name, _, value in lines)
    return sorted(pair for pair in pairs if pair[0] not in (b"date", b"connection", b"x-request-id", but))
