"""An HTTP server that takes what a sink posts, and answers as a test says."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    """One POST."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


@dataclass
class Reply:
    """What is answered."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Receiver:
    """Listens on port 0 of this machine."""

    def __init__(self, answer: Callable[[Request], Reply] = lambda request: Reply()) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        """All, in order of arrival."""
        self.taken: list[Request] = []
        """Those answered with 200, whether or not the answer arrived."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                request = Request(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                receiver.requests.append(request)
                reply = receiver.answer(request)
                if reply.status == 200:
                    receiver.taken.append(request)
                with suppress(BrokenPipeError, ConnectionResetError):  # who asked may have been killed
                    self.send_response(reply.status)
                    for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(reply.body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.02)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def receiving(answer: Callable[[Request], Reply] = lambda request: Reply()) -> Generator[Receiver]:
    """A receiver that serves while entered."""
    receiver = Receiver(answer)
    thread = threading.Thread(target=receiver.serve, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.close()
        thread.join(5)
