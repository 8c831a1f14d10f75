"""A hand-written rollout service: real gRPC, real gloo receivers, samples from the weights that it was last given.

Samples derive from ids alone, so that asking twice, or a fresh process brought to the same state, gives the same ones.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from furlong import addresses, rpc
from furlong.rundir import RunDir
from furlong.v1 import rollout_pb2, rollout_pb2_grpc, sample_pb2, weights_pb2
from tests.trainer.tiny_model import VOCABULARY, make_sample

LIMIT_S = 4.0
MAX_RESPONSE = 5
EOS = 1


class Receiver:
    """One engine's end of the weight group. Knows torch's layout of keys, and none of the trainer's code."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[str, torch.Tensor] = {}
        self._group: Any = None  # Any: torch's stub of ProcessGroupGloo lacks its collectives

    def join(self, host: str, port: int, name: str, world_size: int) -> None:
        store = TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=LIMIT_S))
        nested = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._group = ProcessGroupGloo(nested, self.rank, world_size, timedelta(seconds=LIMIT_S))

    def receive(self, bucket: weights_pb2.Bucket) -> None:
        assert self._group is not None
        flat = torch.empty(sum(spec.size_bytes for spec in bucket.tensors), dtype=torch.uint8)
        self._group.broadcast([flat]).wait()
        parts = flat.split([spec.size_bytes for spec in bucket.tensors])
        for spec, part in zip(bucket.tensors, parts, strict=True):
            self.tensors[spec.name] = part.clone().view(getattr(torch, spec.dtype)).view(tuple(spec.shape))

    def digest(self, name: str) -> str:
        raw = self.tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.blake2b(raw, digest_size=16).hexdigest()


class FakeRollout(rollout_pb2_grpc.RolloutServicer):
    """The service. `calls` lists what was called; `before` may hold a function a method, run as it begins."""

    def __init__(
        self, model_dir: Path, *, num_groups: int = 2, per_group: int = 4, num_engines: int = 1, seed: int = 0
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.lm: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.engines = [Receiver(rank) for rank in range(1, num_engines + 1)]
        self.calls: list[str] = []
        self.before: dict[str, Callable[[grpc.ServicerContext], None]] = {}
        self.versions: list[int] = []
        self.attempts: list[int] = []
        self.restored: list[bytes | None] = []
        self.committed: list[int] = []
        self.served: dict[int, str] = {}
        self.next_rollout_id: int | None = None
        self.version: int | None = None
        self._open: rollout_pb2.BeginWeightUpdateRequest | None = None
        self._group_of = ""
        self._group_name = ""
        self._updates = 0
        self.num_groups, self._per_group, self._seed = num_groups, per_group, seed

    def _enter(self, name: str, context: grpc.ServicerContext) -> None:
        self.calls.append(name)
        if name in self.before:
            self.before[name](context)

    def NextBatch(
        self, request: rollout_pb2.NextBatchRequest, context: grpc.ServicerContext
    ) -> Iterator[rollout_pb2.NextBatchResponse]:
        self._enter("NextBatch", context)
        if self.next_rollout_id not in (request.rollout_id, request.rollout_id + 1):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"state is at {self.next_rollout_id}")
        if self.version != request.policy_version:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"engines hold {self.version}")
        begun = time.monotonic()
        groups = [self._group(request.rollout_id, group) for group in range(self.num_groups)]
        raw = b"".join(group.SerializeToString(deterministic=True) for group in groups)
        self.served[request.rollout_id] = hashlib.sha256(raw).hexdigest()
        self.next_rollout_id = request.rollout_id + 1
        for group in groups:
            yield rollout_pb2.NextBatchResponse(group=group)
        rewards = [sample.reward for group in groups for sample in group.samples]
        summary = rollout_pb2.BatchSummary(
            rollout_id=request.rollout_id,
            num_groups=len(groups),
            num_samples=len(rewards),
            reward_sum=sum(rewards),
            reward_count=len(rewards),
            rollout_time_s=time.monotonic() - begun,
        )
        yield rollout_pb2.NextBatchResponse(summary=summary)

    def _group(self, rollout_id: int, number: int) -> sample_pb2.Group:
        generator = torch.Generator().manual_seed(self._seed * 7919 + rollout_id * 101 + number)
        prompt = torch.randint(2, VOCABULARY, (3,), generator=generator).tolist()
        samples = []
        for index in range(self._per_group):
            response, log_probs = self._generate(prompt, generator)
            reward = sum(token % 2 for token in response) / len(response)
            samples.append(
                make_sample(index, prompt, response, reward=reward, log_probs=log_probs, version=self.version or 0)
            )
        group_index = rollout_id * self.num_groups + number
        return sample_pb2.Group(group_index=group_index, prompt_index=number, samples=samples)

    @torch.no_grad()
    def _generate(self, prompt: list[int], generator: torch.Generator) -> tuple[list[int], list[float]]:
        ids, log_probs = list(prompt), []
        while len(ids) < len(prompt) + MAX_RESPONSE and (len(ids) == len(prompt) or ids[-1] != EOS):
            scores = torch.log_softmax(self.lm(input_ids=torch.tensor([ids])).logits[0, -1], 0)
            token = int(torch.multinomial(scores.exp(), 1, generator=generator))
            ids.append(token)
            log_probs.append(float(scores[token]))
        return ids[len(prompt) :], log_probs

    def Evaluate(
        self, request: rollout_pb2.EvaluateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.EvaluateResponse:
        self._enter(f"Evaluate {request.rollout_id} {request.policy_version}", context)
        return rollout_pb2.EvaluateResponse()

    def BeginWeightUpdate(
        self, request: rollout_pb2.BeginWeightUpdateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.BeginWeightUpdateResponse:
        self._enter("BeginWeightUpdate", context)
        self._open, self.version = request, None
        self._updates += 1
        is_new = self._group_of != request.trainer_incarnation
        if is_new:
            self._group_of, self._group_name = request.trainer_incarnation, f"weights-{self._updates}-{id(self)}"
        return rollout_pb2.BeginWeightUpdateResponse(
            update_id=str(self._updates),
            group_name=self._group_name,
            world_size=len(self.engines) + 1,
            group_is_new=is_new,
            engines=self._engines(),
        )

    def _engines(self) -> list[weights_pb2.Engine]:
        return [weights_pb2.Engine(engine_id=f"engine-{engine.rank - 1}") for engine in self.engines]

    def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.JoinWeightGroupResponse:
        self._enter("JoinWeightGroup", context)
        assert self._open is not None
        where = self._open.master_address, self._open.master_port, self._group_name, len(self.engines) + 1
        self._all(lambda engine: engine.join(*where))
        return rollout_pb2.JoinWeightGroupResponse()

    def ReceiveBucket(
        self, request: rollout_pb2.ReceiveBucketRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.ReceiveBucketResponse:
        self._enter(f"ReceiveBucket {request.bucket_index}", context)
        assert self._open is not None
        bucket = self._open.buckets[request.bucket_index]
        self._all(lambda engine: engine.receive(bucket))
        return rollout_pb2.ReceiveBucketResponse()

    def _all(self, action: Callable[[Receiver], None]) -> None:
        def act(engine: Receiver) -> None:
            with contextlib.suppress(RuntimeError):  # the trainer gave this update up: the checksums will tell
                action(engine)

        threads = [threading.Thread(target=act, args=(engine,), daemon=True) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)

    def CommitWeightUpdate(
        self, request: rollout_pb2.CommitWeightUpdateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.CommitWeightUpdateResponse:
        self._enter("CommitWeightUpdate", context)
        for engine in self.engines:
            for checksum in request.checksums:
                if engine.digest(checksum.name) != checksum.digest:
                    context.abort(grpc.StatusCode.DATA_LOSS, f"engine {engine.rank}: {checksum.name} differs")
        self.lm.load_state_dict(self.engines[0].tensors, strict=False)
        self.version = request.policy_version
        self.versions.append(self.version)
        return rollout_pb2.CommitWeightUpdateResponse(engines=self._engines(), verification="checksum")

    def AbortWeightUpdate(
        self, request: rollout_pb2.AbortWeightUpdateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.AbortWeightUpdateResponse:
        self._enter("AbortWeightUpdate", context)
        self._group_of = ""
        return rollout_pb2.AbortWeightUpdateResponse()

    def SaveState(
        self, request: rollout_pb2.SaveStateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.SaveStateResponse:
        self._enter("SaveState", context)
        return rollout_pb2.SaveStateResponse(state=json.dumps({"next": request.rollout_id + 1}).encode())

    def RestoreState(
        self, request: rollout_pb2.RestoreStateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.RestoreStateResponse:
        self._enter("RestoreState", context)
        self.next_rollout_id = request.next_rollout_id
        self.attempts.append(request.attempt)
        self.restored.append(request.state if request.HasField("state") else None)
        return rollout_pb2.RestoreStateResponse()

    def GetStatus(
        self, request: rollout_pb2.GetRolloutStatusRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.GetRolloutStatusResponse:
        return rollout_pb2.GetRolloutStatusResponse(phase="idle")

    def CommitCheckpoint(
        self, request: rollout_pb2.CommitCheckpointRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.CommitCheckpointResponse:
        self._enter("CommitCheckpoint", context)
        self.committed.append(request.rollout_id)
        return rollout_pb2.CommitCheckpointResponse()


def serve(fake: FakeRollout, run_dir: RunDir) -> rpc.SyncServer:
    """Listen on a free port, SERVING, published in the run directory."""
    server = rpc.start_sync_server(
        lambda server: rollout_pb2_grpc.add_RolloutServicer_to_server(fake, server),
        names=("furlong.v1.Rollout",),
        host="127.0.0.1",
    )
    server.set_serving(serving=True)
    addresses.publish(run_dir, "rollout", grpc=server.address)
    return server
