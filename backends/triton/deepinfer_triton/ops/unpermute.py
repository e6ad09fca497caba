"""unpermute: one program per token and column tile; rows are added in the order of the token's choices."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["height"])
def unpermute_kernel(rows, inverse, shared, count, height, out, K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr):
    overlap()
    t = tl.program_id(0).to(tl.int64)
    if t < valid_rows(count, height):
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < H
        total = tl.zeros([TILE], tl.float32)
        for j in tl.static_range(K):
            row = tl.load(inverse + t * K + j).to(tl.int64)
            total += tl.load(rows + row * H + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if shared is not None:
            total += tl.load(shared + t * H + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + t * H + column, narrow(total, out.dtype.element_ty), mask=inside)


def unpermute(target: Target, rows, inverse, shared, count, out) -> None:
    height, hidden = out.shape
    tile = min(target.columns, next_power_of_2(hidden))
    launch(
        unpermute_kernel, (height, cdiv(hidden, tile)), rows, inverse, shared, count, height, out,
        K=inverse.shape[1], H=hidden, TILE=tile, early=True,
    )  # fmt: skip


MAKERS = [offer("unpermute", unpermute, supports=serves(rows=DENSE, out=DENSE))]
