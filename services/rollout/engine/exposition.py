"""The engine's counters as Prometheus text, under SGLang's names.

It owns names and labels. It must never compute anything but a ratio of two gauges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.rollout.engine.counters import Histogram

if TYPE_CHECKING:
    from services.rollout.engine.engine import Engine


def render_metrics(engine: Engine) -> str:
    """Return the whole page."""
    name = engine.options.served_model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    labels = f'engine_type="unified",model_name="{name}",pp_rank="0",tp_rank="0"'
    return "\n".join([*_gauges(engine, labels), *_counters(engine, labels), *_histograms(engine, labels), ""])


def _gauges(engine: Engine, labels: str) -> Iterator[str]:
    scheduler = engine.scheduler
    used, total = scheduler.batch.used_tokens, engine.limits.max_total_tokens
    values: dict[str, tuple[str, float]] = {
        "num_running_reqs": ("Samples that run.", len(scheduler.batch.running)),
        "num_queue_reqs": ("Samples that wait.", len(scheduler.waiting)),
        "num_used_tokens": ("Positions in use.", used),
        "max_total_num_tokens": ("Positions that may be in use.", total),
        "token_usage": ("Share of the positions in use.", used / total),
        "weights_valid": ("1 while the engine holds complete weights.", engine.weights.invalid_reason is None),
    }
    for name, (text, value) in values.items():
        yield from _family(name, "gauge", text)
        yield f"sglang:{name}{{{labels}}} {float(value)}"


def _counters(engine: Engine, labels: str) -> Iterator[str]:
    counters = engine.scheduler.counters
    values: dict[str, tuple[str, int]] = {
        "prompt_tokens_total": ("Prompt tokens of admitted samples.", counters.prompt_tokens),
        "cached_tokens_total": ("Prompt tokens taken from a sibling sample.", counters.cached_tokens),
        "generation_tokens_total": ("Generated tokens.", counters.generated_tokens),
        "num_requests_total": ("Samples that have ended.", counters.num_requests),
        "num_aborted_requests_total": ("Samples that were aborted.", counters.num_aborted),
        "decode_steps_total": ("Decode steps.", counters.decode_steps),
    }
    for name, (text, value) in values.items():
        yield from _family(name, "counter", text)
        yield f"sglang:{name}{{{labels}}} {float(value)}"


def _histograms(engine: Engine, labels: str) -> Iterator[str]:
    counters = engine.scheduler.counters
    values = {
        "time_to_first_token_seconds": ("Time to the first token.", counters.first_token_s),
        "e2e_request_latency_seconds": ("Time from request to end.", counters.latency_s),
        "queue_time_seconds": ("Time in the queue.", counters.queue_s),
    }
    for name, (text, histogram) in values.items():
        yield from _family(name, "histogram", text)
        yield from _histogram(f"sglang:{name}", labels, histogram)


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    total = 0
    for bound, count in zip((*map(float, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}'
    yield f"{name}_sum{{{labels}}} {histogram.total}"
    yield f"{name}_count{{{labels}}} {float(total)}"


def _family(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP sglang:{name} {text}"
    yield f"# TYPE sglang:{name} {kind}"
