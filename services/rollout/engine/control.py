"""Endpoints that steer the engine: abort, pause, cache, pace; and those that tell how it is.

It owns health: /ping says that the process answers, /health that the model thread does and that the weights are
valid, /ready that a request would be taken now.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any, cast

from services.rollout.engine.engine import SGLANG_VERSION, Engine
from services.rollout.engine.errors import field_error, semantic_error
from services.rollout.engine.exposition import render_metrics
from services.rollout.engine.http import (
    TEXT_HEADERS,
    Answer,
    Application,
    Request,
    json_answer,
    text_answer,
)
from services.rollout.engine.scheduler import PauseMode

HEALTH_TIMEOUT_S = 20.0
POLL_S = 0.01
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
METRICS_HEADERS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


class ControlEndpoints:
    """Handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def register(self, app: Application) -> None:
        """Add the routes."""
        app.route("GET", "/health", "/health_generate", handler=self.health)
        app.route("GET", "/ready", handler=self.ready)
        app.route("GET POST", "/ping", handler=self.ping)
        app.route("GET", "/model_info", "/get_model_info", handler=self.model_info)
        app.route("GET", "/server_info", "/get_server_info", handler=self.server_info)
        app.route("GET", "/v1/models", handler=self.models)
        app.route("GET", "/v1/models/*", handler=self.model)
        app.route("GET", "/v1/loads", handler=self.loads)
        app.route("POST", "/abort_request", handler=self.abort)
        app.route("POST", "/pause_generation", handler=self.pause)
        app.route("POST", "/continue_generation", handler=self.resume)
        app.route("GET POST", "/flush_cache", handler=self.flush)
        app.route("POST", "/slow_down", handler=self.slow_down)
        if self.engine.options.enable_metrics:
            app.route("GET", "/metrics", handler=self.metrics)

    async def health(self, _request: Request) -> Answer:
        """200 if the model thread answers and the weights are valid."""
        reason = self.engine.weights.invalid_reason
        if reason is not None:
            return json_answer({"error": {"message": self.engine.scheduler.unusable_text()}}, 503)
        try:
            await self._on_model_thread(lambda: None, timeout_s=HEALTH_TIMEOUT_S)
        except TimeoutError:
            message = f"The model thread did not answer within {HEALTH_TIMEOUT_S:g} s."
            return json_answer({"error": {"message": message}}, 503)
        return Answer(headers=TEXT_HEADERS)

    async def ready(self, _request: Request) -> Answer:
        """200 if a request would be generated now."""
        engine = self.engine
        serving = engine.weights.usable and not engine.scheduler.paused and not engine.draining
        return Answer(200 if serving else 503, headers=TEXT_HEADERS)

    async def ping(self, _request: Request) -> Answer:
        """200: the process answers."""
        return Answer(headers=TEXT_HEADERS)

    async def model_info(self, _request: Request) -> Answer:
        """What is served, and in which version."""
        engine = self.engine
        return json_answer(
            {
                "model_path": engine.model_path,
                "served_model_name": engine.served_model_name,
                "tokenizer_path": engine.options.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": engine.weights.version,
                "weights_valid": engine.weights.invalid_reason is None,
                "weights_invalid_reason": engine.weights.invalid_reason,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": engine.config.model_type,
                "architectures": [engine.config.architecture],
            }
        )

    async def server_info(self, _request: Request) -> Answer:
        """Flags, limits and the state now."""
        engine, options = self.engine, self.engine.options
        state = {
            "weight_version": engine.weights.version,
            "last_gen_throughput": 0.0,
            "max_running_requests_per_dp": options.max_running_requests,
        }
        return json_answer(
            {
                "model_path": options.model_path,
                "tokenizer_path": options.tokenizer_path,
                "served_model_name": engine.served_model_name,
                "host": options.host,
                "dtype": options.dtype,
                "device": "cpu",
                "random_seed": options.random_seed,
                "context_length": engine.limits.context_length,
                "max_running_requests": options.max_running_requests,
                "max_queued_requests": options.max_queued_requests,
                "max_total_tokens": engine.limits.max_total_tokens,
                "max_total_num_tokens": engine.limits.max_total_tokens,
                "max_req_input_len": engine.limits.context_length - 1,
                "weight_version": options.weight_version,
                "enable_metrics": options.enable_metrics,
                "row_tile": engine.model.gemm.tile,
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "status": "ready" if engine.weights.usable else "starting",
                "startup_time": engine.started,
                "internal_states": [state],
                "version": SGLANG_VERSION,
                "frontend": "furlong",
            }
        )

    async def models(self, _request: Request) -> Answer:
        """The list of one model."""
        return json_answer({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Answer:
        """One model by its name."""
        name = request.path.removeprefix("/v1/models/")
        if name != self.engine.served_model_name:
            body = {"object": "error", "message": f"The model '{name}' does not exist", "type": "invalid_request_error"}
            return json_answer({**body, "param": "model", "code": "model_not_found"}, 404)
        return json_answer(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        name = self.engine.served_model_name
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self.engine.limits.context_length,
        }

    async def loads(self, _request: Request) -> Answer:
        """How busy the engine is."""
        engine = self.engine
        batch, waiting = engine.scheduler.batch, len(engine.scheduler.waiting)
        used, total = batch.used_tokens, engine.limits.max_total_tokens
        paused = engine.scheduler.paused
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": len(batch.running),
            "num_waiting_reqs": waiting,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "num_active_tokens": used,
            "max_total_num_tokens": total,
            "max_running_requests": engine.options.max_running_requests,
            "token_usage": round(used / total, 4),
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": len(batch.running) / engine.options.max_running_requests,
            "queues": {"waiting": waiting, "grammar": 0, "paused": waiting if paused else 0, "retracted": 0},
        }
        stamp = datetime.now(UTC).isoformat()
        return json_answer({"timestamp": stamp, "version": SGLANG_VERSION, "num_accelerators": 1, "loads": [load]})

    async def abort(self, request: Request) -> Answer:
        """End one sample by its id, or all; always 200."""
        body = request.json()
        rid = body.get("rid", "")
        if not isinstance(rid, str):
            raise field_error(("body", "AbortReq", "rid"), "string_type", "Input should be a valid string", rid)
        if body.get("abort_all") is True:
            self.engine.scheduler.abort(None)
        elif rid:
            self.engine.scheduler.abort(rid)
        return Answer()

    async def pause(self, request: Request) -> Answer:
        """Stop generating in one of three ways."""
        mode = request.json().get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            message = "Input should be 'abort', 'retract' or 'in_place'"
            raise field_error(("body", "PauseGenerationReqInput", "mode"), "literal_error", message, mode)
        scheduler = self.engine.scheduler
        await self._on_model_thread(lambda: scheduler.pause(cast(PauseMode, mode)))
        return json_answer({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Answer:
        """Go on after a pause."""
        request.json()
        await self._on_model_thread(self.engine.scheduler.resume)
        return json_answer({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Answer:
        """Forget keys and values, if nothing runs."""
        try:
            timeout_s = float(request.query.get("timeout", "0"))
        except ValueError:
            raise semantic_error(f"timeout must be a number, got {request.query['timeout']!r}.") from None
        deadline = time.monotonic() + timeout_s
        while not await self._on_model_thread(self.engine.scheduler.flush):
            if timeout_s <= 0:
                return text_answer("Flush cache failed.\n", 400)
            if time.monotonic() >= deadline:
                return text_answer("Timed out waiting for idle state.", 400)
            await asyncio.sleep(POLL_S)
        return text_answer(FLUSHED)

    async def slow_down(self, request: Request) -> Answer:
        """Sleep before each decode step: for tests."""
        value = request.json().get("forward_sleep_time")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise field_error(
                ("body", "forward_sleep_time"), "float_type", "Input should be a number >= 0 or null", value
            )
        self.engine.scheduler.forward_sleep_s = float(value or 0)
        return json_answer(None)

    async def metrics(self, _request: Request) -> Answer:
        """Prometheus text."""
        return Answer(200, render_metrics(self.engine).encode(), METRICS_HEADERS)

    async def _on_model_thread(self, function: Any, timeout_s: float | None = None) -> Any:
        future = self.engine.scheduler.call(function)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s or HEALTH_TIMEOUT_S * 3)
