"""Counts of what the engine has done, for /metrics, /v1/loads and /server_info.

It owns the sums. It must never hold rates: they are made from two readings, by whoever asks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from services.rollout.engine.sample import Sample

LATENCY_BOUNDS_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)


@dataclass
class Histogram:
    """Counts by upper bound, as Prometheus wants them."""

    bounds: tuple[float, ...] = LATENCY_BOUNDS_S
    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class Counters:
    """Sums since the start. Written by the model thread, read by any."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    num_requests: int = 0
    num_aborted: int = 0
    first_token_s: Histogram = field(default_factory=Histogram)
    latency_s: Histogram = field(default_factory=Histogram)
    queue_s: Histogram = field(default_factory=Histogram)

    def finished(self, sample: Sample) -> None:
        """Count a sample that has ended."""
        self.num_requests += 1
        self.cached_tokens += sample.cached_tokens
        if sample.finish_reason and sample.finish_reason["type"] == "abort":
            self.num_aborted += 1
        if sample.first_token:
            self.first_token_s.observe(sample.first_token - sample.created)
            self.queue_s.observe(sample.first_scheduled - sample.created)
        self.latency_s.observe(sample.finished - sample.created)
