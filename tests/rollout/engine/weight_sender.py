"""The trainer's side of a weight update as SGLang wants it: a store, a gloo group of its own, broadcasts."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.rollout.engine.engine_process import call_port

TIMEOUT = timedelta(seconds=20)
Named = Sequence[tuple[str, Tensor]]


class WeightSender:
    """Rank 0 of a group with one engine."""

    def __init__(self, port: int, group: str = "weights") -> None:
        self.port, self.group = port, group
        self._pool = ThreadPoolExecutor(2)

    def post(self, path: str, body: Any) -> Any:
        return call_port(self.port, "POST", path, body)

    def later(self, path: str, body: Any) -> Future[Any]:
        return self._pool.submit(self.post, path, body)

    def join(self) -> Any:
        from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            store_port = probe.getsockname()[1]
        body = {"master_address": "127.0.0.1", "master_port": store_port, "rank_offset": 1, "world_size": 2}
        answer = self.later("/init_weights_update_group", body | {"group_name": self.group, "backend": "gloo"})
        url = f"tcp://127.0.0.1:{store_port}"
        store, rank, size = next(iter(dist.rendezvous(url, 0, 2, timeout=TIMEOUT)))
        prefix = dist.PrefixStore(self.group, store)
        name = GroupName(self.group)
        handle, _ = _new_process_group_helper(size, rank, [], Backend("gloo"), prefix, group_name=name, timeout=TIMEOUT)
        assert isinstance(handle, dist.ProcessGroup)
        self.handle = handle
        _world.pg_group_ranks[self.handle] = {0: 0, 1: 1}
        self._store = store
        return answer.result()

    def leave(self) -> None:
        dist.destroy_process_group(self.handle)
        self._pool.shutdown(wait=False)

    def announce(self, tensors: Named, **fields: Any) -> Future[Any]:
        """POST an update; the broadcasts must follow."""
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": self.group,
        }
        return self.later("/update_weights_from_distributed", body | fields)

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.handle.broadcast([tensor.contiguous()], options).wait()

    def send(self, tensors: Named, **fields: Any) -> Any:
        answer = self.announce(tensors, **fields)
        for _, tensor in tensors:
            self.broadcast(tensor)
        return answer.result()

    def send_bucket(self, tensors: Named, **fields: Any) -> Any:
        answer = self.announce(tensors, load_format="flattened_bucket", **fields)
        self.broadcast(torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors]))
        return answer.result()


def read_tensors(folder: Path) -> list[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    return sorted(load_file(folder / "model.safetensors").items())


def die_in_the_middle(port: int, folder: Path, group: str) -> None:
    """Join, open a session, send half of an announced update, and be gone."""
    sender = WeightSender(port, group)
    assert sender.join().status == 200
    tensors = read_tensors(folder)
    assert sender.post("/begin_weight_update", {}).status == 200
    sender.announce(tensors)
    for _, tensor in tensors[: len(tensors) // 2]:
        sender.broadcast(tensor)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_in_the_middle(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
