"""Matrix products whose row results do not depend on how many other rows there are.

It owns the choice of the row tile. A BLAS may pick another kernel, and so another order of additions, for another
number of rows; then a token's log-prob would depend on the batch it was in. Row counts are therefore always multiples
of ROW_STEP, at most MAX_TILE rows go into one call, and `choose_row_tile` proves at start, on this CPU and with the
model's own shapes, that every such call gives each row the same bits as a call of ROW_STEP rows. If the proof fails,
every call has exactly ROW_STEP rows; if even the place in the tile matters, every row is multiplied alone. It must
never be bypassed: all weights are applied through `RowGemm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

ROW_STEP = 8
MAX_TILE = 64


def padded_rows(num_rows: int) -> int:
    """Round a row count up to what the kernels are called with."""
    return -(-num_rows // ROW_STEP) * ROW_STEP


class RowGemm:
    """Applies [K, N] weights to [M, K] rows in tiles of at most `tile` rows."""

    def __init__(self, tile: int = MAX_TILE) -> None:
        self.tile = tile

    def multiply(self, rows: Tensor, weight: Tensor, out: Tensor) -> None:
        """out[M, N] = rows[M, K] @ weight[K, N], in the weight's dtype."""
        if weight.dtype != rows.dtype:
            out.copy_(self._product(rows.to(weight.dtype), weight))
        elif rows.shape[0] <= self.tile:
            torch.mm(rows, weight, out=out)
        else:
            for start in range(0, rows.shape[0], self.tile):
                end = start + self.tile
                torch.mm(rows[start:end], weight, out=out[start:end])

    def accumulate(self, total: Tensor, rows: Tensor, weight: Tensor) -> None:
        """total[M, N] += rows[M, K] @ weight[K, N]."""
        if weight.dtype != rows.dtype:
            total.add_(self._product(rows.to(weight.dtype), weight))
        elif rows.shape[0] <= self.tile:
            total.addmm_(rows, weight)
        else:
            for start in range(0, rows.shape[0], self.tile):
                end = start + self.tile
                total[start:end].addmm_(rows[start:end], weight)

    def _product(self, rows: Tensor, weight: Tensor) -> Tensor:
        if rows.shape[0] <= self.tile:
            return torch.mm(rows, weight)
        parts = [torch.mm(rows[at : at + self.tile], weight) for at in range(0, rows.shape[0], self.tile)]
        return torch.cat(parts)


@dataclass(frozen=True, order=True)
class GemmShape:
    """A [depth, width] matrix, and whether its products are added to what is there."""

    depth: int
    width: int
    accumulates: bool


def choose_row_tile(shapes: Iterable[GemmShape], dtype: torch.dtype) -> int:
    """Return the largest tile (MAX_TILE, ROW_STEP or 1) that is safe for all these products."""
    tile = MAX_TILE
    generator = torch.Generator().manual_seed(0)
    for shape in sorted(set(shapes)):
        weight = torch.randn(shape.depth, shape.width, generator=generator).to(dtype)
        rows = torch.randn(MAX_TILE, shape.depth, generator=generator).to(dtype)
        product = _plain(weight)
        if shape.accumulates and dtype == torch.float32:  # other dtypes are added in float32 afterwards
            product = _added(weight, torch.randn(MAX_TILE, shape.width, generator=generator))
        tile = min(tile, safe_tile(product, rows, generator))
        if tile == 1:
            break
    return tile


Product = Callable[[Tensor, Tensor], Tensor]  # (rows, index of those rows in the probe) -> results


def _plain(weight: Tensor) -> Product:
    return lambda rows, _index: torch.mm(rows, weight)


def _added(weight: Tensor, base: Tensor) -> Product:
    return lambda rows, index: torch.addmm(base[index], rows, weight)


def safe_tile(product: Product, rows: Tensor, generator: torch.Generator) -> int:
    """Return the largest tile in which this product of `rows` [MAX_TILE, K] gives each row the same bits."""
    tiles = torch.arange(MAX_TILE).split(ROW_STEP)
    reference = torch.cat([product(rows[part], part) for part in tiles])
    shuffled = torch.randperm(MAX_TILE, generator=generator)
    for part in shuffled.split(ROW_STEP):
        if not torch.equal(product(rows[part], part), reference[part]):
            return 1
    for count in range(2 * ROW_STEP, MAX_TILE + 1, ROW_STEP):
        part = shuffled[:count]
        if not torch.equal(product(rows[part], part), reference[part]):
            return ROW_STEP
    return MAX_TILE
