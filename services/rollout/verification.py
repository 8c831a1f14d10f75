"""How an engine shows that it holds the bytes that were sent.

The CPU engine checks every tensor's digest itself at the end of an update ("checksum"). SGLang cannot: it fuses tensors
and hashes them its own way. There, three things are checked, and the result is called "sampled":

1. its hash of each tensor must go with the digests of the tensors it is made of: equal digests give an equal hash,
   other digests another one, from one update to the next and from engine to engine;
2. small tensors are read back byte for byte and digested, from model classes that can show them;
3. it must know every tensor that was sent (SGLang skips unknown names in silence).
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.checksum import bytes_checksum
from services.rollout.engine_http import EngineCallFailed, EngineHttp

MAX_SHOWN_TENSORS = 8
MAX_SHOWN_VALUES = 65536

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class WrongBytes(Exception):
    """An engine holds other bytes than were sent."""


@dataclass(frozen=True)
class SentTensor:
    """One tensor of an update."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


Parts = Mapping[str, tuple[str, str]]
"""An engine's tensors: the digests that each is made of, and the hash that the engine told."""


def check_against(last: Parts, part: str, digests: str, told: str) -> None:
    """Raises WrongBytes when a hash contradicts that of the last update."""
    if part not in last:
        return
    last_digests, last_told = last[part]
    if digests == last_digests and told != last_told:
        raise WrongBytes(f"{part}: the same bytes were sent as before, but its hash is {told}, not {last_told}")
    if digests != last_digests and told == last_told:
        raise WrongBytes(f"{part}: other bytes were sent than before, but its hash is still {told}")


def find_contradiction(told_by: Mapping[str, Parts]) -> str:
    """What engines say differently of the same bytes, in words. Empty: nothing."""
    first: Parts | None = None
    for engine, parts in told_by.items():
        first = parts if first is None else first
        different = [part for part in parts if parts[part] != first.get(part)]
        if different:
            return f"{engine} has another hash of {different[0]} than {next(iter(told_by))}"
    return ""


async def verify_sglang(engine: EngineHttp, tensors: Sequence[SentTensor], last: Parts, *, timeout_s: float) -> Parts:
    """Check one SGLang engine; what it told. last: the same of the last update. Raises WrongBytes, EngineCallFailed."""
    answer = await engine.post("/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
    told = _hashes(answer)
    if not told:
        raise WrongBytes("weights_checker told no checksums")
    sources = _sources(tensors, told)
    parts: dict[str, tuple[str, str]] = {}
    for part, sent in sources.items():
        digests = "+".join(tensor.digest for tensor in sent)
        check_against(last, part, digests, told[part])
        parts[part] = (digests, told[part])
    await _read_back(engine, tensors, timeout_s=timeout_s)
    return parts


def _hashes(answer: Any) -> dict[str, str]:  # Any: SGLang's JSON
    """Hash of each of the engine's tensors; those of several tensor-parallel ranks joined."""
    ranks = answer.get("ranks") if isinstance(answer, Mapping) else None
    joined: dict[str, list[str]] = {}
    for rank in ranks or []:
        for name, value in rank.get("checksums", {}).items():
            joined.setdefault(name, []).append(str(value))
    return {name: ",".join(values) for name, values in joined.items()}


def _sources(tensors: Sequence[SentTensor], told: Mapping[str, str]) -> dict[str, list[SentTensor]]:
    """Which sent tensors each of the engine's tensors is made of. Raises WrongBytes for one that the engine lacks."""
    sources: dict[str, list[SentTensor]] = {}
    for tensor in tensors:
        part = engine_name(tensor.name)
        if part not in told:
            if tensor.name == "lm_head.weight" or "rotary_emb" in tensor.name:
                continue  # tied to the embedding, or computed
            raise WrongBytes(f"{tensor.name} was sent, but the engine has no {part}")
        sources.setdefault(part, []).append(tensor)
    return sources


def engine_name(name: str) -> str:
    """SGLang's name for the tensor that a Hugging Face tensor becomes part of."""
    return re.sub(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.", lambda found: f".{_FUSED[found[1]]}.", name)


async def _read_back(engine: EngineHttp, tensors: Sequence[SentTensor], *, timeout_s: float) -> None:
    small = [tensor for tensor in tensors if _num_values(tensor) <= MAX_SHOWN_VALUES and 0 < len(tensor.shape) <= 2]
    small = [tensor for tensor in small if tensor.dtype in ("float32", "bfloat16")]
    step = max(1, len(small) // MAX_SHOWN_TENSORS)
    for tensor in small[::step][:MAX_SHOWN_TENSORS]:
        body = {"name": tensor.name, "truncate_size": max(tensor.shape)}
        try:
            rows = await engine.post("/get_weights_by_name", body, timeout_s=timeout_s)
        except EngineCallFailed as error:
            if error.status == 400:
                return  # this model class cannot show its tensors
            raise
        if rows is None:
            return
        if digest_of_values(rows, tensor.dtype) != tensor.digest:
            raise WrongBytes(f"{tensor.name}: what the engine shows of it is not what was sent")


def _num_values(tensor: SentTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def digest_of_values(rows: Sequence[Any], dtype: str) -> str:
    """BLAKE2b (16 bytes) of numbers as the little-endian bytes that a contiguous tensor of that dtype has."""
    flat = [value for row in rows for value in (row if isinstance(row, list) else [row])]
    packed = struct.pack(f"<{len(flat)}f", *flat)
    if dtype == "bfloat16":  # the upper half of a float32; exact, since the engine shows bfloat16 values
        packed = b"".join(packed[i + 2 : i + 4] for i in range(0, len(packed), 4))
    return bytes_checksum(packed)
