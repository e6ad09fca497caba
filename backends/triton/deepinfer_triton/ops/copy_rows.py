"""copy_rows, copy_blocks and snapshot_state: one program per pair of rows and piece of a row copies bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target

PIECE_BYTES = 8192


@triton.jit
def copy_rows_kernel(src, src_stride, src_rows, dst_rows, dst, dst_stride, row_bytes, TILE: tl.constexpr):
    i = tl.program_id(0)
    source, goal = tl.load(src_rows + i).to(tl.int64), tl.load(dst_rows + i).to(tl.int64)
    if (source >= 0) & (goal >= 0):
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < row_bytes
        value = tl.load(src + source * src_stride + column, mask=inside, other=0)
        tl.store(dst + goal * dst_stride + column, value, mask=inside)


def copy_rows(target: Target, src, src_rows, dst_rows, dst) -> None:
    rows, row_bytes = src_rows.shape[0], src.shape[1]
    tile = min(PIECE_BYTES, max(16, next_power_of_2(row_bytes)))
    launch(
        copy_rows_kernel, (rows, cdiv(row_bytes, tile)), src, src.stride(0), src_rows, dst_rows, dst,
        dst.stride(0), row_bytes, TILE=tile,
    )  # fmt: skip


def copy_within(target: Target, src, dst, store) -> None:
    """copy_blocks and snapshot_state: source and destination rows are of one store."""
    copy_rows(target, store, src, dst, store)


MAKERS = [
    offer("copy_rows", copy_rows, supports=serves(), targets=NVIDIA),
    offer("copy_blocks", copy_within, supports=serves(), targets=NVIDIA),
    offer("snapshot_state", copy_within, supports=serves(), targets=NVIDIA),
]
