"""draft_features: elementwise over column tiles of a row; streams are added from 0 up."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, NVIDIA, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def draft_features_kernel(
    streams, count, rows, out, out_stride, M: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    if t < valid_rows(count, rows):
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < H
        total = tl.load(streams + t * (M * H) + column, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(1, M):
            total += tl.load(streams + t * (M * H) + j * H + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + t * out_stride + column, narrow(total / M, out.dtype.element_ty), mask=inside)


def draft_features(target: Target, streams, count, out) -> None:
    rows, m, hidden = streams.shape
    tile = min(target.columns, next_power_of_2(hidden))
    launch(
        draft_features_kernel, (rows, cdiv(hidden, tile)), streams, count, rows, out, out.stride(0), M=m, H=hidden,
        TILE=tile,
    )  # fmt: skip


MAKERS = [offer("draft_features", draft_features, supports=serves(streams=DENSE, out=DENSE), targets=NVIDIA)]
