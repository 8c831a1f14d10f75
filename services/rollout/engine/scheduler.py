"""Continuous batching: which samples run, and the thread that runs the model.

It owns the queue, the slots, pausing and the order of events. Everything here happens on the model thread; other
threads only post to the inbox (`submit`, `abort`, `call`). It must never block on anything but its inbox, and never
decide anything by the clock: what a sample gets depends on its own prompt, parameters and seed alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from services.rollout.engine.batch import Batch
from services.rollout.engine.counters import Counters
from services.rollout.engine.model import CausalModel
from services.rollout.engine.sample import Sample, aborted
from services.rollout.engine.stopping import TextStops, finish_reason
from services.rollout.engine.tokenizer import Tokenizer
from services.rollout.engine.weights import WeightState

PauseMode = Literal["abort", "retract", "in_place"]
Event = tuple[Sample, int]
Deliver = Callable[[list[Event]], None]
T = TypeVar("T")
MAX_PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class Limits:
    """Bounds of the queue and of what runs at once."""

    max_running: int
    max_queued: int
    max_total_tokens: int


class Scheduler:
    """Runs samples in slots of a `CausalModel` until they end."""

    def __init__(
        self,
        model: CausalModel,
        weights: WeightState,
        tokenizer: Tokenizer,
        *,
        limits: Limits,
        deliver: Deliver,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.model, self.weights, self.tokenizer, self.limits = model, weights, tokenizer, limits
        self.batch = Batch(model, max_running=limits.max_running)
        self.waiting: deque[Sample] = deque()
        self.paused = False
        self.forward_sleep_s = 0.0
        self.counters = Counters()
        self._deliver, self._on_crash = deliver, on_crash
        self._events: list[Event] = []
        self._stops: dict[Sample, TextStops] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._idle_waiters: list[tuple[Future[None], Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        """Start the model thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Let the thread end after the current step."""
        self._post(self._set_stopping)
        self._thread.join(timeout_s)

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue the samples of one request."""
        self._post(lambda: self._enqueue(samples))

    def abort(self, rid: str | None, *, message: str = "Aborted") -> None:
        """End one sample, or all if rid is None; unknown ids are ignored."""
        self._post(lambda: self._abort(lambda sample: rid is None or sample.rid == rid, message))

    def abort_sample(self, sample: Sample) -> None:
        """End exactly this sample, whatever ids others carry."""
        self._post(lambda: self._abort(lambda item: item is sample, "Aborted"))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the model thread, between steps."""
        future: Future[T] = Future()
        self._post(lambda: _settle(future, function))
        return future

    def when_idle(self, function: Callable[[], None]) -> Future[None]:
        """Admit nothing new, and run a function as soon as nothing runs, or at once while paused."""
        future: Future[None] = Future()
        self._post(lambda: self._idle_waiters.append((future, function)))
        return future

    def cancel_idle(self, future: Future[None]) -> None:
        """Stop waiting for `when_idle`; admission goes on."""

        def cancel() -> None:
            self._idle_waiters = [item for item in self._idle_waiters if item[0] is not future]

        self._post(cancel)

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    # The model thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
        except BaseException as error:  # the top of the thread: the process must not live on without it
            self._on_crash(error)

    def _turn(self) -> None:
        if not (self._inbox or self._can_work() or self._is_idle_awaited()):
            self._wake.wait()
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()()
        self._settle_idle()
        if self._can_work():
            if self.batch.poisoned and not self.batch.running:
                self.model.cache.clear()
                self.batch.poisoned = False
            if self.waiting and not self._idle_waiters:
                self._admit()
            if self.batch.running:
                self._step()
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _can_work(self) -> bool:
        if self.paused or not self.weights.usable or self._stopping:
            return False
        return bool(self.batch.running) or bool(self.waiting and not self._idle_waiters)

    def _set_stopping(self) -> None:
        self._stopping = True

    def _is_idle_awaited(self) -> bool:
        return bool(self._idle_waiters) and (self.paused or not self.batch.running or not self.weights.usable)

    def _settle_idle(self) -> None:
        if self._is_idle_awaited():
            waiters, self._idle_waiters = self._idle_waiters, []
            for future, function in waiters:
                _settle(future, function)

    def _enqueue(self, samples: Sequence[Sample]) -> None:
        if self.weights.invalid_reason is not None:
            for sample in samples:
                self._refuse(sample, self.unusable_text())
        elif len(self.waiting) + len(samples) > self.limits.max_queued + self.batch.num_free:
            for sample in samples:
                self._refuse(sample, "The request queue is full.")
        else:
            self.waiting.extend(samples)

    def unusable_text(self) -> str:
        """Why generation is refused, and what helps."""
        reason = (self.weights.invalid_reason or "").rstrip(".")
        return f"The engine has no valid weights: {reason}. Send a complete weight update, then retry."

    def _refuse(self, sample: Sample, text: str) -> None:
        sample.finish_error = text
        self._finish(sample, aborted(text, status=503))

    def _admit(self) -> None:
        admitted: list[Sample] = []
        tokens = 0
        prompts: set[tuple[int, int]] = set()
        while self.waiting and len(admitted) < self.batch.num_free:
            sample = self.waiting[0]
            length = 0 if sample.prompt_key in prompts else len(sample.prompt) + len(sample.output_ids)
            room = self.limits.max_total_tokens - self.batch.reserved_tokens
            if sum(item.reserved_tokens for item in admitted) + sample.reserved_tokens > room:
                break
            if admitted and tokens + length > MAX_PREFILL_TOKENS:
                break
            tokens += length
            prompts.add(sample.prompt_key)
            admitted.append(self.waiting.popleft())
        if not admitted:
            return
        self.counters.prompt_tokens += sum(len(sample.prompt) for sample in admitted)
        for sample in self.batch.prefill(admitted, self.weights.sequence):
            self._after_token(sample)
        for sample in admitted:
            if sample.params.max_new_tokens == 0:
                self._finish(sample, {"type": "length", "length": 0})

    def _step(self) -> None:
        if self.forward_sleep_s:
            time.sleep(self.forward_sleep_s)
        for sample in self.batch.step():
            self._after_token(sample)
        self.counters.decode_steps += 1

    def _after_token(self, sample: Sample) -> None:
        params = sample.params
        token = sample.output_ids[-1]
        count = len(sample.output_ids)
        self.counters.generated_tokens += 1
        logprob = sample.output_logprobs[-1]
        if logprob != logprob:  # NaN
            self.batch.poisoned = True
            self._finish(sample, aborted("The model's output is not a number; its weights are broken.", status=500))
        elif token in sample.stop_ids or count >= params.max_new_tokens or params.stop or params.stop_regex:
            reason = finish_reason(sample, token, self._stops_of(sample))
            if reason is not None:
                self._finish(sample, reason)
        if sample.stream and sample.finish_reason is None and (count == 1 or count % params.stream_interval == 0):
            self._events.append((sample, count))

    def _stops_of(self, sample: Sample) -> TextStops | None:
        if not (sample.params.stop or sample.params.stop_regex):
            return None
        stops = self._stops.get(sample)
        if stops is None:
            stops = self._stops[sample] = TextStops(sample, self.tokenizer)
        return stops

    def _finish(self, sample: Sample, reason: dict[str, object]) -> None:
        if sample.slot >= 0:
            self.batch.release(sample)
        self._stops.pop(sample, None)
        sample.close_span(self.weights.version)
        sample.finished = time.time()
        sample.finish_reason = reason
        self.counters.finished(sample)
        self._events.append((sample, len(sample.output_ids)))

    def _abort(self, chosen: Callable[[Sample], bool], message: str) -> None:
        for sample in [item for item in self.waiting if chosen(item)]:
            self.waiting.remove(sample)
            self._finish(sample, aborted(message))
        for sample in [item for item in self.batch.running if chosen(item)]:
            self._finish(sample, aborted(message))

    # Run on the model thread through `call`.

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. abort: end all; retract: back to the queue; in_place: keep keys and values."""
        self.paused = True
        if mode == "abort":
            self._abort(lambda _sample: True, "Aborted")
        elif mode == "retract":
            self.retract()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False

    def retract(self) -> None:
        """Put all running samples back to the head of the queue; they keep their tokens."""
        for sample in sorted(self.batch.running, key=lambda item: item.created, reverse=True):
            self.batch.release(sample)
            sample.num_retractions += 1
            self.waiting.appendleft(sample)

    def flush(self) -> bool:
        """Forget the cache; False if anything runs or waits."""
        if self.batch.running or (self.waiting and not self.paused):
            return False
        self.model.cache.clear()
        return True

    def change_weights(self, change: Callable[[], T], *, flush: bool) -> T:
        """Run something that may change the weights or their version, and keep the samples' stories straight."""
        version, sequence = self.weights.version, self.weights.sequence
        try:
            return change()
        finally:
            if self.weights.sequence != sequence or self.weights.version != version:
                for sample in (*self.batch.running, *self.waiting):
                    if sample.output_ids:
                        sample.close_span(version)
            if self.weights.sequence != sequence and flush:
                self.retract()
                self.model.cache.clear()
            if self.weights.invalid_reason is not None:
                self.drop_all()

    def drop_all(self) -> None:
        """End every sample, since the weights cannot be trusted: 503 where nothing was generated yet."""
        for sample in (*self.batch.running, *self.waiting):
            if not sample.output_ids:
                sample.finish_error = self.unusable_text()
            self._finish(sample, aborted(self.unusable_text(), status=503))
        self.waiting.clear()


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():  # its client left before its turn
        return
    try:
        future.set_result(function())
    except Exception as error:  # handed to the caller, who is waiting on the future
        future.set_exception(error)
