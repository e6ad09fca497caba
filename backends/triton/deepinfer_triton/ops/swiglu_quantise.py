"""swiglu_quantise: one program per row and column tile of whole groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, quantise_groups, valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.rows import tile_width
from deepinfer_triton.sizes import cdiv
from deepinfer_triton.support import ACTIVATIONS, DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["height"])
def swiglu_quantise_kernel(
    gate_up, stride, weights, source, limit, rows, height, out, out_scale, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    overlap()
    row = tl.program_id(0).to(tl.int64)
    if row < valid_rows(rows, height):
        at = tl.program_id(1) * TILE + tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        inside = at < WIDTH
        weight = 1.0
        if weights is not None:
            weight = tl.load(weights + tl.load(source + row))
        gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * stride + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)  # comparisons, so that NaN stays NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = gate / (1.0 + tl.exp(-gate)) * up
        if weights is not None:
            value *= weight
        if out_scale is not None:
            code, scale = quantise_groups(value, "fp8_32")
            tl.store(out + row * WIDTH + at, code.to(tl.uint8), mask=inside)
            group = tl.program_id(1) * (TILE // 32) + tl.arange(0, TILE // 32)
            tl.store(out_scale + row * (WIDTH // 32) + group, scale.to(tl.uint8), mask=group < WIDTH // 32)
        else:
            tl.store(out + row * WIDTH + at, narrow(value, out.dtype.element_ty), mask=inside)


def swiglu_quantise(target: Target, gate_up, weights, source, limit, rows, out, out_scale=None) -> None:
    height, width = out.shape
    tile = min(target.columns, tile_width(width))
    launch(
        swiglu_quantise_kernel, (height, cdiv(width, tile)), gate_up, gate_up.stride(0), weights, source, limit,
        rows, height, out, out_scale if out.dtype == torch.uint8 else None, WIDTH=width, TILE=tile, early=True,
    )  # fmt: skip


MAKERS = [offer("swiglu_quantise", swiglu_quantise, supports=serves(gate_up=DENSE, out=ACTIVATIONS))]
