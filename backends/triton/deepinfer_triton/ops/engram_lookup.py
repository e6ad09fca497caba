"""engram_lookup: one program copies one row of the table, codes and scales, or decodes it.

A table kept in pinned host memory is read over the bus by the same loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import decode_e4m3, decode_ue8m0, narrow, valid_rows
from deepinfer_triton.sizes import next_power_of_2
from deepinfer_triton.support import ACTIVATIONS, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.weights import stored


@triton.jit(do_not_specialize=["height", "size"])
def engram_lookup_kernel(
    rows, values, scales, size, count, height, out, out_scale, C: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    if t < valid_rows(count, height):
        at = t * C + tl.program_id(1)
        row = tl.load(rows + at)
        there = (row >= 0) & (row < size)
        row = tl.where(there, row, 0)
        column = tl.arange(0, TILE)
        inside = column < D
        code = tl.load(values + row * D + column, mask=inside & there, other=0)
        if out_scale is not None:
            group = tl.arange(0, TILE // 32)
            scale = tl.load(scales + row * (D // 32) + group, mask=(group < D // 32) & there, other=127)
            tl.store(out + at * D + column, code, mask=inside)
            tl.store(out_scale + at * (D // 32) + group, scale, mask=group < D // 32)
        else:
            scale = tl.load(scales + row * (D // 32) + column // 32, mask=inside & there, other=127)
            value = decode_e4m3(code) * decode_ue8m0(scale)
            tl.store(out + at * D + column, narrow(value, out.dtype.element_ty), mask=inside)


def engram_lookup(target: Target, rows, table, count, out, out_scale=None) -> None:
    kept = stored(table)
    height, columns = rows.shape
    size, width = table.shape
    launch(
        engram_lookup_kernel, (height, columns), rows, kept.values, kept.scales, size, count, height, out,
        out_scale if out.dtype == torch.uint8 else None,
        C=columns, D=width, TILE=max(32, next_power_of_2(width)), warps=1,
    )  # fmt: skip


MAKERS = [offer("engram_lookup", engram_lookup, supports=serves(out=ACTIVATIONS))]
