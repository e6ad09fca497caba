"""hyper_connection_post: a program holds a column tile of all streams, so that they can be replaced in place."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def hyper_connection_post_kernel(
    y, post, comb, count, rows, streams, M: tl.constexpr, MP: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    if t < valid_rows(count, rows):
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < H
        k = tl.arange(0, MP)
        result = tl.load(y + t * H + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(post + t * M + k, mask=k < M, other=0.0)[:, None] * result[None, :]
        for i in tl.static_range(M):
            stream = tl.load(streams + t * (M * H) + i * H + column, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(comb + t * (M * M) + i * M + k, mask=k < M, other=0.0)[:, None] * stream[None, :]
        at = streams + t * (M * H) + k[:, None] * H + column[None, :]
        tl.store(at, narrow(total, streams.dtype.element_ty), mask=(k < M)[:, None] & inside[None, :])


def hyper_connection_post(target: Target, y, post, comb, count, streams) -> None:
    rows, m, hidden = streams.shape
    tile = min(target.columns, next_power_of_2(hidden))
    launch(
        hyper_connection_post_kernel, (rows, cdiv(hidden, tile)), y, post, comb, count, rows, streams,
        M=m, MP=next_power_of_2(m), H=hidden, TILE=tile,
    )  # fmt: skip


MAKERS = [offer("hyper_connection_post", hyper_connection_post, supports=serves(streams=DENSE, out=DENSE))]
