"""An engine for tests of clients: answers what SGLang's answers look like, and keeps what it was asked to end."""

import json
from dataclasses import dataclass, field

import orjson

from tests.router.fake_worker import Seen

JSON = b"content-type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
WORDS = ("one", " two", " three")
USAGE = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}


@dataclass
class Engine:
    """The handler of a fake worker."""

    running: int = 0
    """Requests that it says run, until they are aborted."""
    flushes: int = 0
    aborts: list[dict[str, object]] = field(default_factory=list)
    authorizations: list[bytes] = field(default_factory=list)

    async def __call__(self, seen: Seen) -> None:
        self.authorizations += seen.header(b"authorization")
        path = seen.path.decode()
        if path in ("/v1/chat/completions", "/v1/completions"):
            await self._complete(seen, chat="chat" in path)
        elif path == "/abort_request":
            self.aborts.append(json.loads(seen.body))
            self.running = 0
            await seen.answer(b"")
        elif path == "/flush_cache":
            self.flushes += 1
            await seen.answer(b"Cache flushed.\n")
        else:
            content = self._content(path)
            status = b"200 OK" if content is not None else b"404 Not Found"
            await seen.answer(orjson.dumps(content or {"detail": "Not Found"}), status=status, extra=JSON)

    def _content(self, path: str) -> object:
        load = {"dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": 0, "queues": {"waiting": 0}}
        model = {"id": "tiny", "object": "model", "created": 1, "owned_by": "sglang", "max_model_len": 2048}
        return {
            "/generate": {"text": "ok", "meta_info": {"id": "x", "finish_reason": {"type": "length", "length": 1}}},
            "/get_model_info": {"model_path": "tiny", "is_generation": True, "weight_version": "7"},
            "/model_info": {"model_path": "tiny", "is_generation": True, "weight_version": "7"},
            "/server_info": {"model_path": "tiny", "internal_states": [{}], "version": "0.5.23"},
            "/get_server_info": {"model_path": "tiny", "internal_states": [{}], "version": "0.5.23"},
            "/v1/loads": {"timestamp": "t", "version": "0.5.23", "num_accelerators": 1, "loads": [load]},
            "/v1/models": {"object": "list", "data": [model]},
            "/pause_generation": {"message": "Generation paused successfully.", "status": "ok"},
        }.get(path)

    async def _complete(self, seen: Seen, *, chat: bool) -> None:
        asked = json.loads(seen.body)
        if not asked.get("stream"):
            await seen.answer(orjson.dumps(_completion("".join(WORDS), chat=chat, streamed=False)), extra=JSON)
            return
        await seen.send(SSE)
        for word in WORDS:
            await seen.send(_chunk(b"data: " + orjson.dumps(_completion(word, chat=chat, streamed=True)) + b"\n\n"))
        await seen.send(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _completion(text: str, *, chat: bool, streamed: bool) -> dict[str, object]:
    message = {"role": "assistant", "content": text}
    choice = {"delta" if streamed else "message": message} if chat else {"text": text}
    return {
        "id": "x",
        "object": ("chat.completion" if chat else "text_completion") + (".chunk" if streamed and chat else ""),
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "finish_reason": None if streamed else "stop", "logprobs": None, **choice}],
        **({} if streamed else {"usage": USAGE}),
    }


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
