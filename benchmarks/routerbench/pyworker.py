"""The benchmark's fake worker where there is no C compiler: the same marks, counts and answers as `fakeworker.c`.

python -m benchmarks.routerbench.pyworker PORT
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import cast

import httptools
import uvloop

MARK_BYTES = 8192
ANSWER = json.dumps({"text": "an answer", "meta_info": {"id": "1"}}).encode().ljust(1800)
EVENT = b'data: {"text":"%0271d"}\n\n' % 7
REFUSAL = b'{"error":{"message":"as the mark asked","type":"BadRequestError"}}'
MODEL = b'{"model_path":"/fake","tokenizer_path":"/fake","served_model_name":"fake","is_generation":true}'
MODELS = b'{"object":"list","data":[{"id":"fake","object":"model","created":1,"owned_by":"sglang","root":"/fake"}]}'
count = dict.fromkeys(("generates", "aborted", "connections", "open", "body_bytes", "chunks", "in_flight", "peak"), 0)
last_head = [""]


class Peer(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self.parser = httptools.HttpRequestParser(self)
        self.timer: asyncio.TimerHandle | None = None
        self.answering = False
        count["connections"] += 1
        count["open"] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        count["open"] -= 1
        if self.answering:
            count["in_flight"] -= 1
            count["aborted"] += 1
            self.answering = False
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body_bytes, self.target, self.headers = 0, b"", list[tuple[bytes, bytes]]()
        if self.timer is not None:
            self.timer.cancel()

    def on_url(self, url: bytes) -> None:
        self.target += url
        self.marks = self.target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        if name.lower() == b"expect":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        if len(self.marks) < MARK_BYTES:
            self.marks += body[:MARK_BYTES]

    def on_message_complete(self) -> None:
        self.answering, self.close_ms = True, -1
        count["in_flight"] += 1
        count["peak"] = max(count["peak"], count["in_flight"])
        path = self.target.split(b"?")[0]
        if path == b"/generate":
            self._generate()
        elif path == b"/stats":
            seen = {**count, "in_flight": count["in_flight"] - 1, "last_head": last_head[0]}
            self._answer(200, json.dumps(seen).encode())
        elif path in (b"/health", b"/ready", b"/health_generate"):
            self._answer(200, b"")
        elif path == b"/v1/models" or b"info" in path:
            self._answer(200, MODELS if path == b"/v1/models" else MODEL)
        else:
            said = {"target": self.target.decode(), "bytes": self.body_bytes}
            self._answer(404 if b"missing" in path else 200, json.dumps(said).encode())

    def _mark(self, name: bytes, otherwise: int) -> int:
        found = re.search(rb"@%s=(\d+)@" % name, self.marks)
        return int(found[1]) if found else otherwise

    def _generate(self) -> None:
        count["generates"] += 1
        count["body_bytes"] += self.body_bytes
        lines = [b"POST %s HTTP/1.1" % self.target, *(b"%s: %s" % header for header in self.headers)]
        last_head[0] = b"\n".join(lines).decode("latin1") + "\n\n"
        self.close_ms = self._mark(b"close", -1)
        self.left = self.chunks = self._mark(b"chunks", 32)
        self._after(self._mark(b"wait", 0) / 1000, self._begin)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        if seconds > 0:
            self.timer = asyncio.get_running_loop().call_later(seconds, call)
        else:
            call()

    def _begin(self) -> None:
        status = self._mark(b"status", 200)
        if status == 200 and re.search(rb'"stream": ?true', self.marks):
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self.transport.write(head)
            self._event()
        elif b"@die@" in self.marks:
            self._leave()
        elif b"@half@" in self.marks:
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1800\r\n\r\n" + ANSWER[:800])
            self._leave()
        else:
            self._answer(status, ANSWER if status == 200 else REFUSAL)

    def _event(self) -> None:
        gap_s = self._mark(b"gap", 1000) / 1e6
        while self.left:
            self.transport.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            count["chunks"] += 1
            self.left -= 1
            if b"@die@" in self.marks and self.left == self.chunks // 2:
                self._leave()
                return
            if gap_s:
                self._after(gap_s, self._event)
                return
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self._answered()

    def _answer(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d As asked\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n"
        self.transport.write(head % (status, len(body)) + (b"" if self.parser.get_method() == b"HEAD" else body))
        self._answered()

    def _answered(self) -> None:
        count["in_flight"] -= 1
        self.answering = False
        if self.close_ms >= 0:
            self._after(self.close_ms / 1000, self.transport.close)
        elif not self.parser.should_keep_alive():
            self.transport.close()

    def _leave(self) -> None:
        count["in_flight"] -= 1
        self.answering = False
        self.transport.close()


async def serve(port: int) -> None:
    """Until killed; prints the port."""
    server = await asyncio.get_running_loop().create_server(Peer, "127.0.0.1", port, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
