"""stream_collapse: elementwise over column tiles of a row; streams are added from 0 up."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit
def collapse(streams, pre, t, column, inside, M: tl.constexpr, H: tl.constexpr):
    """float32 sum over j of pre[t, j] * streams[t, j, column], from stream 0 up."""
    total = tl.load(pre + t * M) * tl.load(streams + t * (M * H) + column, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(1, M):
        stream = tl.load(streams + t * (M * H) + j * H + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(pre + t * M + j) * stream
    return total


@triton.jit(do_not_specialize=["rows"])
def stream_collapse_kernel(streams, pre, count, rows, out, M: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    if t < valid_rows(count, rows):
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        value = collapse(streams, pre, t, column, column < H, M, H)
        tl.store(out + t * H + column, narrow(value, out.dtype.element_ty), mask=column < H)


def stream_collapse(target: Target, streams, pre, count, out) -> None:
    rows, m, hidden = streams.shape
    tile = min(target.columns, next_power_of_2(hidden))
    launch(
        stream_collapse_kernel,
        (rows, cdiv(hidden, tile)),
        streams,
        pre,
        count,
        rows,
        out,
        M=m,
        H=hidden,
        TILE=tile,
    )


MAKERS = [offer("stream_collapse", stream_collapse, supports=serves(streams=DENSE, out=DENSE))]
