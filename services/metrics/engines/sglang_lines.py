"""The numbers on SGLang's lines about prefill and decode batches. Pure; knows no file and no row.

    [2026-11-29 22:30:58 TP0] Decode batch, #running-req: 3, #token: 49, token usage: 0.00, cpu graph: False,
        gen throughput (token/s): 63.14, #queue-req: 0

Older and newer versions print other keys in another order (`Decode batch.` up to 0.4, `Decode batch [12],` when asked
for); a key that is known is taken wherever it stands, one that is not is left out. Names are those that SGLang gives
the same quantities on /metrics, where it has them there.
"""

import re
from dataclasses import dataclass

from furlong.records import Mean, Sum, Value

_BATCH = re.compile(r"\b(Prefill|Decode) batch(?: \[\d+\])?[.,] ?(.*)", re.DOTALL)
_PAIR = re.compile(r"(#?[A-Za-z][\w ()/.-]*?): ?(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf|True|False)(%?)(?=,|$|\s)")
_RANKS = re.compile(r"\[[\d:. -]{19,27}((?: (?:DP|TP|EP|PP|ATTN_TP|MOE_DP|CP)\d+)*)\]")

_GAUGES = {
    "#running-req": "num_running_reqs",
    "#queue-req": "num_queue_reqs",
    "token usage": "token_usage",
    "full token usage": "full_token_usage",
    "swa token usage": "swa_token_usage",
    "mamba usage": "mamba_usage",
    "#token": "num_used_tokens",
    "#full token": "full_num_used_tokens",
    "#pending-token": "num_pending_tokens",
    "gen throughput (token/s)": "gen_throughput",
    "input throughput (token/s)": "input_throughput",
    "accept len": "spec_accept_length",
    "accept rate": "spec_accept_rate",
    "cap len": "spec_cap_length",
    "#retracted-req": "num_retracted_reqs",
    "#prealloc-req": "num_decode_prealloc_queue_reqs",
    "#transfer-req": "num_decode_transfer_queue_reqs",
    "#bootstrap-req": "num_prefill_bootstrap_queue_reqs",
    "#inflight-req": "num_prefill_inflight_queue_reqs",
}
"""Each line says how it is now: the row has the mean of its lines."""
_COUNTS = {"#new-seq": "new_seqs", "#new-token": "new_tokens", "#cached-token": "cached_tokens"}
"""Each line says what is new: the row has the sum of its lines."""
_GRAPH = re.compile(r"\w+ graph")


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What one line says."""

    rank: str
    """For example `dp1`; empty for the only one, or the first."""
    values: dict[str, Value]


def read_line(text: str) -> EngineReading | None:
    """None: it is no such line."""
    if " batch" not in text or (found := _BATCH.search(text)) is None:
        return None
    is_decode = found[1] == "Decode"
    values: dict[str, Value] = {"num_decode_batches" if is_decode else "num_prefill_batches": Sum(1)}
    for key, number, percent in _PAIR.findall(found[2]):
        name = key.strip()
        if name in _COUNTS:
            values[_COUNTS[name]] = Sum(float(number))
        elif _GRAPH.fullmatch(name):
            values["graph_share"] = Mean(float(number == "True"), 1)
        elif number not in ("True", "False"):
            _take_gauge(values, name, float(number) / 100 if percent else float(number), is_decode=is_decode)
    new, cached = values.get("new_tokens"), values.get("cached_tokens")
    if isinstance(new, Sum) and isinstance(cached, Sum) and new.value + cached.value > 0:
        values["cache_hit_rate"] = Mean(float(cached.value), float(new.value + cached.value))
    return EngineReading(_rank(text[: found.start()]), values) if len(values) > 1 else None


def _take_gauge(values: dict[str, Value], name: str, number: float, *, is_decode: bool) -> None:
    """A prefill line counts the running requests without those that it begins: only decode lines say how many run."""
    known = _GAUGES.get(name)
    if known is None or (known == "num_running_reqs" and not is_decode):
        return
    values[known] = Mean(number, 1)


def _rank(head: str) -> str:
    ranks = _RANKS.search(head)
    parts = ranks[1].split() if ranks else []
    return "-".join(part.lower() for part in parts if not part.endswith("0") or part[-2].isdigit())
