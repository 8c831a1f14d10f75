"""A rollout service in this process, with a real router and engines of its own, and a trainer's calls to it."""

import asyncio
import contextlib
import json
import string
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import grpc.aio

from furlong import addresses, rpc
from furlong.config import RunConfig, to_toml
from furlong.config.rules import resolve
from furlong.process import StopSignal
from furlong.rundir import RunDir
from furlong.service import ServiceContext
from furlong.telemetry import Telemetry
from furlong.v1 import rollout_pb2, rollout_pb2_grpc, sample_pb2, weights_pb2
from services.rollout.main import serve
from services.router.main import Listening, listening
from services.router.settings import RouterSettings
from tests.rollout.fake_engine import VOCABULARY

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
LIMIT_S = 30.0


@dataclass
class FakeTelemetry:
    """Keeps what it is given."""

    attempt: int = 1
    rows: list[tuple[str, int, dict[str, Any], int]] = field(default_factory=list)

    def metrics(self, axis: str, step: int, values: Mapping[str, Any], **_: object) -> None:
        self.rows.append((axis, step, dict(values), self.attempt))

    def record(self, obj: Mapping[str, object]) -> None:
        """Phases and the like; no test looks at them here."""

    @property
    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(connected=True)

    def flush(self, timeout_s: float) -> bool:
        return True


def write_model(folder: Path) -> Path:
    """A folder with a character tokenizer and a config, enough for rollout itself: no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    words = {letter: i for i, letter in enumerate(string.ascii_lowercase[:VOCABULARY])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": 64}))
    return folder


def write_lines(path: Path, items: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def make_config(root: Path, *, run: Mapping[str, Any] | None = None, **rollout: Any) -> RunConfig:
    """A resolved run with the fake engine in SGLang's place: 4 prompts a rollout, 2 samples each."""
    import sys

    model = write_model(root / "model")
    data = write_lines(root / "data.jsonl", [{"prompt": f"ab{c}", "label": c} for c in "cdefghijkl"])
    tree = {
        "run": {
            "run_dir": str(root / "run"),
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "drain_budget_s": 6.0,
            "start_timeout_s": 30.0,
            **(run or {}),
        },
        "model": {"hf_checkpoint": str(model)},
        "rollout": {
            "prompt_data": str(data),
            "rm_type": "exact_match",
            "rollout_engine": "sglang",
            "sglang_python": sys.executable,
            "sglang_launcher": str(FAKE_ENGINE),
            "rollout_max_response_len": 8,
            **rollout,
        },
        "router": {"router_health_interval_s": 0.1, "router_queue_timeout_s": 5.0},
    }
    return resolve(RunConfig.model_validate(tree))


@dataclass
class World:
    """A running rollout service."""

    config: RunConfig
    run_dir: RunDir
    telemetry: FakeTelemetry
    stub: Any  # Any: grpc's stubs are typed for blocking use
    http: aiohttp.ClientSession

    async def batch(
        self, rollout_id: int, policy_version: int | None = None
    ) -> tuple[list[sample_pb2.Group], rollout_pb2.BatchSummary]:
        version = rollout_id if policy_version is None else policy_version
        request = rollout_pb2.NextBatchRequest(rollout_id=rollout_id, policy_version=version)
        parts = [part async for part in self.stub.NextBatch(request, timeout=LIMIT_S)]
        return [part.group for part in parts[:-1]], parts[-1].summary

    async def restore(self, state: bytes | None = None, next_rollout_id: int = 0, attempt: int = 1) -> list[str]:
        request = rollout_pb2.RestoreStateRequest(state=state, next_rollout_id=next_rollout_id, attempt=attempt)
        return list((await self.stub.RestoreState(request, timeout=LIMIT_S)).warnings)

    async def status(self) -> rollout_pb2.GetRolloutStatusResponse:
        return await self.stub.GetStatus(rollout_pb2.GetRolloutStatusRequest(), timeout=LIMIT_S)

    async def begin(self, version: int, **changes: Any) -> rollout_pb2.BeginWeightUpdateResponse:
        return await self.stub.BeginWeightUpdate(begin_request(version, **changes), timeout=LIMIT_S)

    async def publish(self, version: int, **changes: Any) -> rollout_pb2.CommitWeightUpdateResponse:
        """A whole update on fake engines, which need no real bytes."""
        begun = await self.begin(version, **changes)
        await self.control_all(weights=f"weights {version}")
        if begun.group_is_new:
            await self.stub.JoinWeightGroup(
                rollout_pb2.JoinWeightGroupRequest(update_id=begun.update_id), timeout=LIMIT_S
            )
        request = rollout_pb2.ReceiveBucketRequest(update_id=begun.update_id, bucket_index=0)
        await self.stub.ReceiveBucket(request, timeout=LIMIT_S)
        return await self.stub.CommitWeightUpdate(commit_request(begun.update_id, version), timeout=LIMIT_S)

    async def engines(self) -> list[weights_pb2.Engine]:
        return list((await self.status()).engines)

    async def control(self, index: int, **changes: Any) -> None:
        engine = (await self.engines())[index]
        async with self.http.post(f"{engine.url}/control", json=changes) as answer:
            assert answer.status == 200

    async def control_all(self, **changes: Any) -> None:
        for index, engine in enumerate(await self.engines()):
            if engine.state != weights_pb2.ENGINE_STATE_GONE:
                await self.control(index, **changes)

    async def seen(self, index: int, path: str) -> list[Any]:
        engine = (await self.engines())[index]
        async with self.http.get(f"{engine.url}/seen") as answer:
            return [item["body"] for item in await answer.json() if item["path"] == path]


def begin_request(version: int, **changes: Any) -> rollout_pb2.BeginWeightUpdateRequest:
    tensor = weights_pb2.TensorSpec(name="w", dtype="float32", shape=[2], size_bytes=8)
    fields: dict[str, Any] = {
        "policy_version": version,
        "mode": weights_pb2.TRANSFER_MODE_BROADCAST,
        "buckets": [weights_pb2.Bucket(index=0, tensors=[tensor])],
        "master_address": "127.0.0.1",
        "master_port": 12345,
        "backend": "gloo",
        "trainer_incarnation": "one",
        "timeout_s": 5.0,
    }
    return rollout_pb2.BeginWeightUpdateRequest(**{**fields, **changes})


def commit_request(update_id: str, version: int, digest: str = "") -> rollout_pb2.CommitWeightUpdateRequest:
    checksum = weights_pb2.TensorChecksum(name="w", digest=digest or f"digest{version}")
    return rollout_pb2.CommitWeightUpdateRequest(update_id=update_id, policy_version=version, checksums=[checksum])


@contextlib.asynccontextmanager
async def router_of(config: RunConfig, *, drain_s: float = 1.0) -> AsyncGenerator[Listening]:
    """A real router in this process, published in the run directory."""
    run_dir = RunDir(Path(config.run.run_dir)).create()
    settings = RouterSettings.of(config)
    async with listening(settings, host=config.run.host, http_port=0, grpc_port=0, drain_s=drain_s) as router:
        addresses.publish(run_dir, "router", grpc=router.grpc, http=router.http)
        try:
            yield router
        finally:
            addresses.withdraw(run_dir, "router")


@contextlib.asynccontextmanager
async def rollout_of(config: RunConfig) -> AsyncGenerator[World]:
    """A rollout service in this process."""
    run_dir = RunDir(Path(config.run.run_dir)).create()
    run_dir.config.write_text(to_toml(config))  # as service.start does; engines read it
    telemetry = FakeTelemetry()
    context = ServiceContext(config, run_dir, "rollout", cast(Telemetry, telemetry), StopSignal())
    async with serve(context):
        entry = addresses.find(run_dir, "rollout")
        assert entry is not None
        assert entry.grpc is not None
        async with rpc.aio_channel(entry.grpc) as channel, aiohttp.ClientSession() as http:
            yield World(config, run_dir, telemetry, rollout_pb2_grpc.RolloutStub(channel), http)


@contextlib.asynccontextmanager
async def world(config: RunConfig) -> AsyncGenerator[World]:
    """Router and rollout, restored to a fresh run and serving version 0."""
    async with router_of(config), rollout_of(config) as running:
        await running.restore()
        await running.publish(0)
        yield running


async def until(condition: Callable[[], Any], *, limit_s: float = 10.0) -> None:
    """Wait until a condition, sync or async, holds."""
    deadline = time.monotonic() + limit_s
    while True:
        result = condition()
        if await result if asyncio.iscoroutine(result) else result:
            return
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and words of a call that must fail."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call should have failed")
