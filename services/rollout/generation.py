"""Asks the router for the samples of one prompt and brings every one of them to an end: a sample, or a reason.

One request a group. Aborted and empty samples, and those of another policy version, are asked for again from the
prompt, a few times. Never keeps partial
tokens, never retries what is refused for good, never waits without a limit.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson
import structlog

from furlong.v1 import sample_pb2
from services.rollout.metrics import Incidents
from services.rollout.receipt import BadAnswer, WrongVersion, read_answer
from services.rollout.retries import RetryPolicy

log = structlog.get_logger()

MAX_ROUNDS = 4
"""Times that an aborted, empty or stale sample is asked for."""


class RequestFailed(Exception):
    """A request got no usable answer, after all retries that were due."""


class RouterAddress(Protocol):
    """Where the router is now; it may come back elsewhere after a restart."""

    @property
    def http(self) -> str: ...
    async def wait_back(self, timeout_s: float) -> None: ...
    async def check_engines(self) -> None: ...


@dataclass(frozen=True)
class Ask:
    """The samples wanted of one prompt."""

    name: str
    """For request ids and logs."""
    prompt_token_ids: "array[int] | Sequence[int]"
    num_samples: int
    sampling_params: Mapping[str, Any]  # Any: SGLang's sampling parameters
    policy_version: int
    seed: Callable[[int, int], int]
    """(sample index, retry) -> sampling seed."""


@dataclass
class Answer:
    """What came of an Ask: all its samples, in order."""

    samples: list[sample_pb2.Sample]
    incidents: Incidents


@dataclass
class Generator:
    """Sends requests to the router."""

    session: aiohttp.ClientSession
    router: RouterAddress
    vocab_size: int
    timeout_s: float
    decode: Callable[[Sequence[int]], str]
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    async def generate(self, ask: Ask) -> Answer:
        """All samples of one prompt. Never raises for what an engine did: such samples are FAILED with the reason."""
        samples: dict[int, sample_pb2.Sample] = {}
        retries = dict.fromkeys(range(ask.num_samples), 0)
        incidents = Incidents()
        pending = list(range(ask.num_samples))
        for round_ in range(MAX_ROUNDS):
            seeds = [ask.seed(index, retries[index]) for index in pending]
            again = []
            for sample in await self._ask_once(ask, pending, seeds, round_, stale=again):
                samples[sample.index] = sample
            if again:
                await self.router.check_engines()
            for index in pending:
                aborted = samples[index].status == sample_pb2.SAMPLE_STATUS_ABORTED
                empty = is_empty(samples[index])
                incidents += Incidents(int(aborted), int(empty))
                retries[index] += int(empty)
                if aborted or empty:
                    again.append(index)
            pending = sorted(again)
            if not pending:
                break
        for index in pending:
            incidents = self._give_up(samples[index], incidents)
        return Answer([samples[index] for index in range(ask.num_samples)], incidents)

    def _give_up(self, sample: sample_pb2.Sample, incidents: Incidents) -> Incidents:
        """The last of too many aborted, empty or stale answers stays. An aborted one counts by its status."""
        if sample.status == sample_pb2.SAMPLE_STATUS_FAILED:
            return incidents
        if sample.status == sample_pb2.SAMPLE_STATUS_ABORTED:
            return incidents + Incidents(num_aborted=-1)
        fail(sample, f"the response was empty {MAX_ROUNDS} times")
        return incidents

    async def _ask_once(
        self, ask: Ask, indices: Sequence[int], seeds: Sequence[int], round_: int, *, stale: list[int]
    ) -> list[sample_pb2.Sample]:
        """stale: gets the indices of those that another policy version wrote."""
        prompt = list(ask.prompt_token_ids)
        request = {
            "input_ids": [prompt] * len(indices),
            "sampling_params": [{**ask.sampling_params, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        try:
            answers = await self._post(f"{ask.name}-r{round_}", request)
            if isinstance(answers, Mapping) and len(indices) == 1:
                answers = [answers]
            if not isinstance(answers, list) or len(answers) != len(indices):
                count = len(answers) if isinstance(answers, list) else type(answers).__name__
                raise RequestFailed(f"asked for {len(indices)} samples, got {count}")
        except RequestFailed as error:
            log.warning("generation_failed", request=ask.name, error=str(error))
            return [failed_sample(index, prompt, str(error)) for index in indices]
        return [self._read(ask, index, answer, stale) for index, answer in zip(indices, answers, strict=True)]

    def _read(self, ask: Ask, index: int, answer: object, stale: list[int]) -> sample_pb2.Sample:
        try:
            sample = read_answer(
                answer,
                index=index,
                prompt_token_ids=ask.prompt_token_ids,
                policy_version=ask.policy_version,
                vocab_size=self.vocab_size,
            )
        except BadAnswer as error:
            if isinstance(error, WrongVersion):
                stale.append(index)
            log.warning("answer_refused", request=ask.name, sample=index, reason=str(error))
            return failed_sample(index, ask.prompt_token_ids, f"answer refused: {error}")
        if sample.response_token_ids and not sample.response:
            sample.response = self.decode(sample.response_token_ids)
        return sample

    async def _post(self, name: str, request: Mapping[str, Any]) -> Any:  # Any: JSON
        try:
            async with asyncio.timeout(self.timeout_s):  # over all attempts, and over waits for a router that is away
                return await self._post_until_answered(name, request)
        except TimeoutError:
            raise RequestFailed(f"no answer within {self.timeout_s:g} s (--rollout-request-timeout-s)") from None

    async def _post_until_answered(self, name: str, request: Mapping[str, Any]) -> Any:  # Any: the engine's JSON
        attempt = 0
        while True:
            attempt += 1
            # a request id of its own each time: the engine may still be busy with the attempt that broke
            body = orjson.dumps({"rid": f"{name}-t{attempt}", **request})
            try:
                status, retry_after, content = await self._post_once(body)
                if status == 200:
                    return orjson.loads(content)
                problem = f"HTTP {status}: {content[:300].decode(errors='replace')}"
            except orjson.JSONDecodeError as error:
                status, retry_after, problem = 502, None, f"the answer is not JSON: {error}"
            except (aiohttp.ClientError, ConnectionError) as error:
                status, retry_after, problem = None, None, f"{type(error).__name__}: {error}"
            delay_s = self.policy.delay_s(attempt, status=status, retry_after=retry_after)
            if delay_s is None:
                raise RequestFailed(f"{problem} (attempt {attempt})")
            log.info("generation_retried", request=name, attempt=attempt, problem=problem, delay_s=round(delay_s, 3))
            await asyncio.sleep(delay_s)
            if status is None:
                await self.router.wait_back(self.timeout_s)

    async def _post_once(self, body: bytes) -> tuple[int, str | None, bytes]:
        async with self.session.post(
            f"{self.router.http}/generate",
            data=body,
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None),  # the caller bounds it
        ) as response:
            return response.status, response.headers.get("Retry-After"), await response.read()


def is_empty(sample: sample_pb2.Sample) -> bool:
    """Whether an otherwise good answer has no tokens."""
    good = sample.status in (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)
    return good and not sample.response_token_ids


def failed_sample(index: int, prompt_token_ids: "array[int] | Sequence[int]", reason: str) -> sample_pb2.Sample:
    """A sample without an answer."""
    return sample_pb2.Sample(
        index=index,
        prompt_token_ids=prompt_token_ids,
        status=sample_pb2.SAMPLE_STATUS_FAILED,
        error=reason,
    )


def fail(sample: sample_pb2.Sample, reason: str) -> None:
    """Mark a sample as failed; it keeps its tokens but has no reward."""
    sample.failed_after_truncation |= sample.status == sample_pb2.SAMPLE_STATUS_TRUNCATED
    sample.status = sample_pb2.SAMPLE_STATUS_FAILED
    sample.error = reason
    sample.ClearField("reward")


def sampling_params(
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    max_new_tokens: int,
    stop: Sequence[str],
    stop_token_ids: Sequence[int],
) -> dict[str, Any]:  # Any: SGLang's sampling parameters
    """The parameters of a request, but for its seed."""
    params: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
    }
    if stop:
        params["stop"] = list(stop)
    if stop_token_ids:
        params["stop_token_ids"] = list(stop_token_ids)
    return params
