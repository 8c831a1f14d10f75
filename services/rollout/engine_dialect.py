"""What differs between engines in a weight update: how a session is opened, ended and verified.

Both speak the same calls; the CPU engine takes a few fields more, and checks every tensor itself.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import structlog

from services.rollout.engine_http import EngineCallFailed, EngineHttp
from services.rollout.verification import Parts, SentTensor, WrongBytes, verify_sglang
from services.rollout.weight_plan import UpdatePlan

log = structlog.get_logger()

RETRY_S = 0.2


class EngineDialect(Protocol):
    """One kind of engine. Callers bound every call."""

    verification: str
    """What commit proves: "checksum" or "sampled"."""

    def limit(self, plan: UpdatePlan) -> dict[str, float]:
        """Fields that tell an engine how long to wait in a collective."""
        ...

    async def open_session(self, http: EngineHttp, *, timeout_s: float) -> None:
        """Open an update session, ending one that was left open. Raises EngineCallFailed."""
        ...

    async def commit(self, http: EngineHttp, plan: UpdatePlan, checksums: Mapping[str, str], last: Parts) -> Parts:
        """End the session, verify, take the version; what the engine told. Raises EngineCallFailed, WrongBytes.

        last: what was told in the last update that was served.
        """
        ...


class CpuDialect:
    """The CPU engine."""

    verification = "checksum"

    def limit(self, plan: UpdatePlan) -> dict[str, float]:
        return {"timeout_s": plan.timeout_s}

    async def open_session(self, http: EngineHttp, *, timeout_s: float) -> None:
        while True:
            try:
                await http.post("/begin_weight_update", {"force": True}, timeout_s=timeout_s)
                return
            except EngineCallFailed as error:
                if error.status != 400:
                    raise
                log.info("weight_session_not_opened", engine=http.engine_id, problem=error.problem)
            await asyncio.sleep(RETRY_S)  # it still receives a bucket of a sender that is gone

    async def commit(self, http: EngineHttp, plan: UpdatePlan, checksums: Mapping[str, str], last: Parts) -> Parts:
        body = {"weight_version": str(plan.policy_version), "checksums": dict(checksums)}
        try:
            await http.post("/end_weight_update", body, timeout_s=plan.timeout_s)
        except EngineCallFailed as error:
            if error.status != 400:
                raise
            raise WrongBytes(error.problem) from error
        return {}


class SglangDialect:
    """SGLang 0.5.21 and later."""

    verification = "sampled"

    def limit(self, plan: UpdatePlan) -> dict[str, float]:
        return {}

    async def open_session(self, http: EngineHttp, *, timeout_s: float) -> None:
        try:
            await http.post("/begin_weight_update", {}, timeout_s=timeout_s)
        except EngineCallFailed as error:
            if error.status != 400:
                raise
            log.info("weight_session_not_opened", engine=http.engine_id, problem=error.problem)
            await http.post("/end_weight_update", {}, timeout_s=timeout_s)
            await http.post("/begin_weight_update", {}, timeout_s=timeout_s)

    async def commit(self, http: EngineHttp, plan: UpdatePlan, checksums: Mapping[str, str], last: Parts) -> Parts:
        sent = [
            SentTensor(tensor.name, tensor.dtype, tuple(tensor.shape), checksums[tensor.name])
            for bucket in plan.request.buckets
            for tensor in bucket.tensors
        ]
        await http.post("/end_weight_update", {}, timeout_s=plan.timeout_s)
        told = await verify_sglang(http, sent, last, timeout_s=plan.timeout_s)
        version = {"new_version": str(plan.policy_version), "abort_all_requests": False}
        await http.post("/update_weight_version", version, timeout_s=plan.timeout_s)
        return told
