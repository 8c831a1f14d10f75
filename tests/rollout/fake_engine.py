"""A hand-written engine that speaks what rollout needs of SGLang's API; its tokens follow from the seeds.

As a script it takes SGLang's flags, so that rollout starts it in SGLang's place. `POST /control` changes what it does.
"""

import argparse
import asyncio
import hashlib
import json
import os
from typing import Any

from aiohttp import web

VOCABULARY = 16


class FakeEngine:
    """State of one fake engine; all attributes can be set over /control."""

    def __init__(self) -> None:
        self.version = "none"
        self.paused = False
        self.session = False
        self.groups: list[str] = []
        self.seen: list[dict[str, Any]] = []
        self.num_generated = 0
        self.weights = "as loaded"
        self.delay_s = 0.0
        self.statuses: list[int] = []
        """Answers of the next /generate requests that are not 200."""
        self.finish: list[str] = []
        """What the next samples are: ok, abort, empty, nan, short, oov, length."""
        self.broken: dict[str, Any] = {}
        """Path -> status, or "hang"."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/control", self.control)
        app.router.add_get("/seen", self.get_seen)
        for path in ("/health", "/ready", "/ping"):
            app.router.add_get(path, self.health)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/{name}", self.admin)
        return app

    async def control(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            setattr(self, name, value)
        return web.json_response({"pid": os.getpid()})

    async def get_seen(self, request: web.Request) -> web.Response:
        return web.json_response(self.seen)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused and request.path == "/ready" else 200)

    async def model_info(self, request: web.Request) -> web.Response:
        if broken := self.broken.get("/model_info"):
            return web.json_response({"message": "told to"}, status=broken)
        return web.json_response({"weight_version": self.version})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append({"path": "/generate", "body": body})
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.statuses:
            return web.json_response({"error": {"message": "told to"}}, status=self.statuses.pop(0))
        answers = [self.sample(params) for params in body["sampling_params"]]
        return web.json_response(answers)

    def sample(self, params: dict[str, Any]) -> dict[str, Any]:
        kind = self.finish.pop(0) if self.finish else "ok"
        seed, length = params["sampling_seed"], 0 if kind == "empty" else min(5, params["max_new_tokens"])
        digest = hashlib.blake2b(f"{self.weights}|{seed}".encode()).digest()
        ids = [3 + digest[i] % (VOCABULARY - 3) for i in range(length)]
        log_probs: list[Any] = [[-0.5 - i / 10, token, None] for i, token in enumerate(ids)]
        if kind == "nan":
            log_probs[0][0] = None
        if kind == "oov":
            ids[0] = log_probs[0][1] = VOCABULARY
        if kind == "short":
            log_probs.pop()
        reasons = {"abort": {"type": "abort", "message": "Aborted"}, "length": {"type": "length", "length": length}}
        self.num_generated += 1
        return {
            "text": "".join(chr(ord("a") + token) for token in ids),
            "output_ids": ids,
            "meta_info": {
                "finish_reason": reasons.get(kind, {"type": "stop", "matched": 1}),
                "output_token_logprobs": log_probs,
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": length}] if length else [],
                "cached_tokens": 1,
            },
        }

    async def admin(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        self.seen.append({"path": f"/{name}", "body": body})
        broken = self.broken.get(f"/{name}")
        if broken == "hang":
            await asyncio.sleep(3600)
        if broken:
            return web.json_response({"success": False, "message": "told to"}, status=broken)
        return self.answer(name, body)

    def answer(self, name: str, body: dict[str, Any]) -> web.Response:
        if name == "begin_weight_update":
            if self.session:
                return web.json_response({"success": False, "message": "already open"}, status=400)
            self.session = True
        elif name == "end_weight_update":
            self.session = False
        elif name in ("pause_generation", "continue_generation"):
            self.paused = name.startswith("pause")
        elif name == "init_weights_update_group":
            self.groups.append(body["group_name"])
        elif name == "destroy_weights_update_group":
            if body["group_name"] not in self.groups:
                return web.json_response({"success": False, "message": "no such group"}, status=400)
            self.groups.remove(body["group_name"])
        elif name == "update_weights_from_distributed" and body["group_name"] not in self.groups:
            return web.json_response({"success": False, "message": "no such group"}, status=400)
        elif name == "update_weight_version":
            self.version = body["new_version"]
        elif name == "weights_checker":
            digest = hashlib.blake2b(self.weights.encode(), digest_size=8).hexdigest()
            return web.json_response({"success": True, "ranks": [{"checksums": {"w": digest}}]})
        elif name == "get_weights_by_name":
            return web.json_response({"error": {"message": "Get parameter by name failed"}}, status=400)
        return web.json_response({"success": True, "message": "Success"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, rest = parser.parse_known_args()
    print(json.dumps({"arguments": rest, "pid": os.getpid(), "environment": sorted(os.environ)}), flush=True)
    web.run_app(
        FakeEngine().app(), host=options.host, port=options.port, print=None, access_log=None, shutdown_timeout=0.1
    )


if __name__ == "__main__":
    main()
