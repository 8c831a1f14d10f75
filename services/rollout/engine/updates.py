"""The weight endpoints.

It owns the bodies and answers of updates, and which thread does what: sockets are waited for in a worker thread,
while the model thread stands still because a session is open. Every wait has a limit, `timeout_s` in the body or the
default here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from services.rollout.engine.engine import Engine
from services.rollout.engine.errors import RequestError, field_error, semantic_error
from services.rollout.engine.group import GroupAddress, GroupError, WeightsGroup, receive_tensors
from services.rollout.engine.http import Answer, Application, Request, json_answer
from services.rollout.engine.weights import Session, TensorSpec, UpdateError, wire_specs

log = structlog.get_logger()
T = TypeVar("T")
GROUP_TIMEOUT_S = 60.0
RECEIVE_TIMEOUT_S = 300.0
IDLE_TIMEOUT_S = 600.0
DEFAULT_GROUP = "weight_update_group"
Body = dict[str, Any]


class WeightEndpoints:
    """Handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def register(self, app: Application) -> None:
        """Add the routes."""
        routes = {
            "/init_weights_update_group": self.init_group,
            "/destroy_weights_update_group": self.destroy_group,
            "/begin_weight_update": self.begin,
            "/update_weights_from_distributed": self.from_distributed,
            "/end_weight_update": self.end,
            "/update_weights_from_disk": self.from_disk,
            "/update_weight_version": self.set_version,
            "/weights_checker": self.check,
        }
        for path, handler in routes.items():
            app.route("POST", path, handler=_answering(handler))
        app.route("GET POST", "/get_weights_by_name", handler=self.get_by_name)

    async def init_group(self, body: Body) -> Answer:
        """Join a trainer's group."""
        address = GroupAddress(
            host=_text(body, "master_address"),
            port=_integer(body, "master_port"),
            rank=_integer(body, "rank_offset"),
            world_size=_integer(body, "world_size"),
            name=_text(body, "group_name", DEFAULT_GROUP),
        )
        address.check(_text(body, "backend", "gloo"))
        timeout_s = _seconds(body, GROUP_TIMEOUT_S)
        await asyncio.to_thread(self.engine.groups.join, address, timeout_s)
        log.info("weights_group_joined", group=address.name, rank=address.rank, world_size=address.world_size)
        return _success("Succeeded to initialize custom process group.")

    async def destroy_group(self, body: Body) -> Answer:
        """Leave a group."""
        name = _text(body, "group_name", DEFAULT_GROUP)
        await asyncio.to_thread(self.engine.groups.destroy, name)
        return _success("Succeeded to destroy custom process group.")

    async def begin(self, body: Body) -> Answer:
        """Open a session, once nothing runs or generation is paused."""
        force = body.get("force") is True
        state, scheduler = self.engine.weights, self.engine.scheduler

        def open_session() -> None:
            if state.receiving.locked():
                raise UpdateError("tensors of the last session are still being received; retry when that has ended")
            scheduler.change_weights(lambda: state.open_session(force=force), flush=True)

        if state.session is not None:
            await self._on_model_thread(open_session)
            return _success("Success")
        timeout_s = _seconds(body, IDLE_TIMEOUT_S)
        future = scheduler.when_idle(open_session)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout_s)
        except TimeoutError:
            scheduler.cancel_idle(future)
            raise UpdateError(
                f"requests still run after {timeout_s:g} s; call pause_generation first, or give more timeout_s"
            ) from None
        return _success("Success")

    async def from_distributed(self, body: Body) -> Answer:
        """Receive tensors from rank 0 of a group."""
        names, dtypes = _strings(body, "names"), _strings(body, "dtypes")
        shapes = _shapes(body)
        version = _optional_text(body, "weight_version")
        load_format = body.get("load_format")
        if load_format not in (None, "auto", "direct", "flattened_bucket"):
            raise UpdateError(f"load_format must be null or 'flattened_bucket', got {load_format!r}")
        state = self.engine.weights
        session = state.require_session("update_weights_from_distributed")
        group = self.engine.groups.get(_text(body, "group_name", DEFAULT_GROUP))
        timeout_s = _seconds(body, RECEIVE_TIMEOUT_S)
        flattened = load_format == "flattened_bucket"

        def receive() -> None:
            try:
                specs = wire_specs(names, dtypes, shapes)
            except UpdateError as error:  # cannot be received: close the group, so that the sender's side fails too
                raise GroupError(str(error)) from error
            self._receive_checked(session, group, specs, flattened=flattened, timeout_s=timeout_s)

        # Shielded: if the client leaves, the thread still writes, and the session must learn how that ended.
        await asyncio.shield(asyncio.ensure_future(self._receive(session, group, receive)))
        session.version = version if version is not None else session.version
        session.flush |= body.get("flush_cache", True) is not False
        tail = f" Weight version {version} takes effect at end_weight_update." if version is not None else ""
        return _success(f"Succeeded to update parameter online.{tail}")

    def _receive_checked(
        self,
        session: Session,
        group: WeightsGroup,
        specs: Sequence[TensorSpec],
        *,
        flattened: bool,
        timeout_s: float,
    ) -> None:
        """Write the tensors; what does not fit is received all the same, so that the sender is not left hanging."""
        state = self.engine.weights
        tensors = receive_tensors(group, specs, flattened=flattened, timeout_s=timeout_s)
        try:
            state.check(specs)
        except UpdateError:
            deque(tensors, maxlen=0)
            raise
        state.write(session, tensors)

    async def _receive(self, session: Session, group: WeightsGroup, receive: Callable[[], None]) -> None:
        state = self.engine.weights

        def run() -> None:
            if not state.receiving.acquire(blocking=False):
                raise UpdateError("another update_weights call of this session is still receiving")
            try:
                receive()
            except Exception as error:
                session.failure = str(error) or type(error).__name__
                raise
            finally:
                state.receiving.release()

        try:
            await asyncio.to_thread(run)
        except Exception as error:
            if isinstance(error, GroupError):
                await asyncio.to_thread(self.engine.groups.discard, group)
            await self._fail(session, str(error) or type(error).__name__)
            raise

    async def _fail(self, session: Session, reason: str) -> None:
        state, scheduler = self.engine.weights, self.engine.scheduler

        def fail() -> None:
            if state.session is session:
                state.fail(reason)

        await self._on_model_thread(lambda: scheduler.change_weights(fail, flush=True))
        log.error("weights_update_failed", reason=reason)

    async def end(self, body: Body) -> Answer:
        """Close the session: verify what came, take the version."""
        version = _optional_text(body, "weight_version")
        checksums = body.get("checksums")
        if checksums is not None and not (
            isinstance(checksums, dict) and all(isinstance(item, str) for item in checksums.values())
        ):
            raise field_error(("body", "checksums"), "dict_type", "Input should map names to strings", checksums)
        expected = _strings(body, "expected_names") if body.get("expected_names") is not None else None
        state, scheduler = self.engine.weights, self.engine.scheduler
        if state.receiving.locked():
            raise UpdateError("tensors are still being received; end the session after that call has answered")

        def close() -> bool:
            if body.get("abort") is True:
                state.require_session("end_weight_update")
                state.give_up("the sender gave the update up")
                return False
            return state.close_session(version=version, checksums=checksums, expected_names=expected)

        flush = state.session.flush if state.session is not None else False
        changed = await self._on_model_thread(lambda: scheduler.change_weights(close, flush=flush))
        log.info("weights_updated", version=state.version, changed=changed)
        return _success("Success")

    async def from_disk(self, body: Body) -> Answer:
        """Replace all weights by a checkpoint folder's."""
        path = _text(body, "model_path")
        version = _optional_text(body, "weight_version")
        engine, scheduler = self.engine, self.engine.scheduler
        if body.get("abort_all_requests") is True:
            scheduler.abort(None)
        flush = body.get("flush_cache", True) is not False

        def load() -> None:
            change = lambda: engine.weights.load_folder(Path(path), version=version)  # noqa: E731
            scheduler.change_weights(change, flush=flush)

        timeout_s = _seconds(body, IDLE_TIMEOUT_S)
        future = scheduler.when_idle(load)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout_s)
        except TimeoutError:
            scheduler.cancel_idle(future)
            raise UpdateError(f"requests still run after {timeout_s:g} s; call pause_generation first") from None
        except UpdateError as error:
            return json_answer({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        engine.model_path = path
        log.info("weights_loaded_from_disk", model_path=path, version=engine.weights.version)
        message = "Succeeded to update model weights." + _version_tail(version)
        return json_answer({"success": True, "message": message, "num_paused_requests": 0})

    async def set_version(self, body: Body) -> Answer:
        """Rename the weights that are there."""
        version = _text(body, "new_version")
        state, scheduler = self.engine.weights, self.engine.scheduler

        def rename() -> None:
            if state.invalid_reason is not None:
                raise UpdateError(f"invalid weights have no version: {state.invalid_reason}")
            state.version = version

        if body.get("abort_all_requests", True) is not False:
            scheduler.abort(None)
        await self._on_model_thread(lambda: scheduler.change_weights(rename, flush=False))
        message = f"Weight version updated to {version}"
        return json_answer({"success": True, "message": message, "new_version": version})

    async def check(self, body: Body) -> Answer:
        """Checksums of all tensors by their Hugging Face names, in the engine's dtype."""
        action = body.get("action", "checksum")
        if action != "checksum":
            raise UpdateError(f"Unsupported action={action!r}")
        sums = await self._on_model_thread(self.engine.weights.all_checksums)
        whole = hashlib.blake2b("".join(f"{name}={sums[name]};" for name in sorted(sums)).encode()).hexdigest()[:64]
        layout = {"role": "target", "rank": 0, "size": 1}
        layout |= {f"{kind}_{what}": at for kind in ("tp", "dp", "pp") for what, at in (("rank", 0), ("size", 1))}
        rank = {"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": [layout]}
        return json_answer({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole})

    async def get_by_name(self, request: Request) -> Answer:
        """The first rows of a tensor."""
        body = request.json()
        name, size = _text(body, "name"), _integer(body, "truncate_size", 100)
        if name not in self.engine.model.parameters.targets:
            raise semantic_error(f"Get parameter by name failed: this model has no tensor {name!r}.")
        tensor = await self._on_model_thread(lambda: self.engine.model.parameters.read(name)[:size].float())
        return json_answer(tensor.tolist())

    async def _on_model_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.wait_for(asyncio.wrap_future(self.engine.scheduler.call(function)), IDLE_TIMEOUT_S)


def _answering(handler: Callable[[Body], Any]) -> Callable[[Request], Any]:
    """Turn a refused update into SGLang's answer."""

    async def serve(request: Request) -> Answer:
        try:
            return await handler(request.json(required=False))
        except UpdateError as error:
            return json_answer({"success": False, "message": str(error)}, 400)

    return serve


def _success(message: str) -> Answer:
    return json_answer({"success": True, "message": message})


def _version_tail(version: str | None) -> str:
    return f" Weight version updated to {version}." if version is not None else ""


def _missing(body: Body, name: str) -> RequestError:
    return field_error(("body", name), "missing", "Field required", body)


def _text(body: Body, name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if value is None:
        raise _missing(body, name)
    if not isinstance(value, str):
        raise field_error(("body", name), "string_type", "Input should be a valid string", value)
    return value


def _optional_text(body: Body, name: str) -> str | None:
    return None if body.get(name) is None else _text(body, name)


def _integer(body: Body, name: str, default: int | None = None) -> int:
    value = body.get(name, default)
    if value is None:
        raise _missing(body, name)
    if type(value) is not int:
        raise field_error(("body", name), "int_type", "Input should be a valid integer", value)
    return value


def _seconds(body: Body, default: float) -> float:
    value = body.get("timeout_s")
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise field_error(("body", "timeout_s"), "float_type", "Input should be a number > 0", value)
    return float(value)


def _strings(body: Body, name: str) -> list[str]:
    value = body.get(name)
    if value is None:
        raise _missing(body, name)
    if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
        raise field_error(("body", name), "list_type", "Input should be a list of strings", value)
    return value


def _shapes(body: Body) -> Sequence[Sequence[int]]:
    value = body.get("shapes")
    if value is None:
        raise _missing(body, "shapes")
    if not isinstance(value, list) or any(
        not isinstance(shape, list) or any(type(item) is not int or item < 0 for item in shape) for shape in value
    ):
        raise field_error(("body", "shapes"), "list_type", "Input should be a list of lists of sizes", value)
    return value
