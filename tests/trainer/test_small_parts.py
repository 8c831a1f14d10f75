"""The small pure parts: attempt numbers, buckets, model FLOPs, lost peers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from furlong.rundir import RunDir
from services.trainer.attempt import next_attempt, read_attempt
from services.trainer.backend import TensorLayout
from services.trainer.buckets import describe, flatten, make_buckets
from services.trainer.flops import ModelSizes, peak_flops, sizes_of, training_flops
from services.trainer.ranks import is_lost_peer


def test_attempts_count_up(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert read_attempt(run_dir) == 0
    assert [next_attempt(run_dir), next_attempt(run_dir)] == [1, 2]


@pytest.mark.parametrize("content", [b"", b"two\n", b"\xff", b"-3"])
def test_attempt_file_that_holds_no_number_starts_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "attempt").write_bytes(content)
    assert next_attempt(RunDir(tmp_path)) == 1


def tensors(*sizes: int) -> list[TensorLayout]:
    return [TensorLayout(f"t{number}", torch.float32, (size,)) for number, size in enumerate(sizes)]


def test_buckets_keep_the_order_and_the_limit() -> None:
    buckets = make_buckets(tensors(10, 20, 30, 500, 5), size_bytes=240)
    assert [[tensor.name for tensor in bucket] for bucket in buckets] == [["t0", "t1", "t2"], ["t3"], ["t4"]]
    assert describe(buckets)[1].tensors[0].size_bytes == 2000


def test_flat_bytes_are_the_tensors_bytes() -> None:
    parts = [torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(), torch.ones(3)]
    raw = b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    assert bytes(flatten(parts).numpy()) == raw


def test_flops_follow_from_the_models_sizes() -> None:
    text = SimpleNamespace(
        vocab_size=100, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, head_dim=16, tie_word_embeddings=True
    )
    config = SimpleNamespace(get_text_config=lambda: text)
    shapes = [("embed", (100, 8)), ("proj", (8, 64)), ("norm", (8,))]
    assert sizes_of(config, shapes) == ModelSizes(800 + 512, 2, 64)
    text.tie_word_embeddings = False
    assert sizes_of(config, [*shapes, ("head", (100, 8))]) == ModelSizes(800 + 512, 2, 64)
    assert training_flops(ModelSizes(10, 2, 4), [3, 5]) == 3 * (2 * 10 * 8 + 2 * 2 * 4 * (9 + 25))


def test_peak_of_an_unknown_device_is_not_guessed() -> None:
    bf16 = torch.bfloat16
    assert peak_flops("NVIDIA H200", bf16) == peak_flops("NVIDIA H100 80GB HBM3", bf16) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", bf16) == 756e12
    assert peak_flops("Some Future Card", bf16) is None
    assert peak_flops("NVIDIA H200", torch.float32) is None  # the table is bf16's


def test_only_a_broken_connection_is_a_lost_peer() -> None:
    assert is_lost_peer(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:9"))
    assert not is_lost_peer(RuntimeError("expected scalar type Float"))
    assert not is_lost_peer(ValueError("closed by peer"))
