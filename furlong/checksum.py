"""The one checksum of a tensor's contents that trainer and engine both compute.

It owns the definition: BLAKE2b with a 16-byte digest over the raw, contiguous bytes in the tensor's own dtype. Shape
and name are not part of it. It must never import torch: a service without torch checks byte buffers with the same
function.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DIGEST_BYTES = 16


def bytes_checksum(buffer: bytes | bytearray | memoryview) -> str:
    """Return the hex digest of a contiguous buffer."""
    return hashlib.blake2b(buffer, digest_size=DIGEST_BYTES).hexdigest()


def tensor_checksum(tensor: Tensor) -> str:
    """Return the hex digest of a tensor's bytes, whatever its strides and device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return bytes_checksum(b"")
    import torch

    return bytes_checksum(flat.view(torch.uint8).numpy().data)
