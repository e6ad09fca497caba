"""Weight tiles for kernels, from the checkpoint's own bytes (`CanonicalWeight`), so that no weight is expanded in
memory.

A backend that offers these kernels keeps the canonical layout for the roles they serve: `stored` takes what
`WeightHandle.canonical()` gives, which for that layout neither allocates nor copies.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from deepinfer_triton.numeric import decode_e2m1, decode_e4m3, decode_ue8m0, scale_groups, unpack


def stored(weight: WeightHandle) -> CanonicalWeight:
    """The bytes of a weight, codes and scales as uint8 views; for a weight that is kept so, the weight itself."""
    kept = weight.canonical()
    if kept.scales is None or kept.values.dtype == kept.scales.dtype == torch.uint8:
        return kept
    return CanonicalWeight(kept.format, kept.values.view(torch.uint8), kept.scales.view(torch.uint8))


def weight_arguments(kept: CanonicalWeight) -> dict[str, Any]:
    """Constants that tell a kernel how the bytes of one matrix lie: format and bytes (or values) of an expert's
    matrix.
    """
    return {
        "FORMAT": kept.format,
        "N": kept.shape[-2],
        "K": kept.shape[-1],
        "MATRIX": math.prod(kept.values.shape[-2:]),
        "SCALES": 0 if kept.scales is None else math.prod(kept.scales.shape[-2:]),
    }


@triton.jit
def load_scale_tile(scales, n, k_start, N: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr):
    """uint8 ue8m0 codes [rows, DEPTH / 32] of rows n from column k_start on; 127 (a factor of one) outside."""
    GROUPS: tl.constexpr = (K + 31) // 32
    group = k_start // 32 + tl.arange(0, DEPTH // 32)
    row = n // 32 if FORMAT == "fp8_block32" else n
    inside = (n < N)[:, None] & (group < GROUPS)[None, :]
    return tl.load(scales + row[:, None].to(tl.int64) * GROUPS + group[None, :], mask=inside, other=127)


@triton.jit
def load_code_tile(values, n, k_start, N: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr):
    """The stored elements of rows n, columns k_start .. k_start + DEPTH: bytes (two columns each for fp4) or floats."""
    if FORMAT == "fp4_row32":
        column = k_start // 2 + tl.arange(0, DEPTH // 2)
        at = values + n[:, None].to(tl.int64) * (K // 2) + column[None, :]
        return tl.load(at, mask=(n < N)[:, None] & (column < K // 2)[None, :], other=0)
    else:
        column = k_start + tl.arange(0, DEPTH)
        at = values + n[:, None].to(tl.int64) * K + column[None, :]
        return tl.load(at, mask=(n < N)[:, None] & (column < K)[None, :], other=0)


@triton.jit
def load_weight_tile(
    values, scales, n, k_start, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, DEPTH] of rows n (int32 [ROWS]) from column k_start on, zeros outside the matrix."""
    codes = load_code_tile(values, n, k_start, N, K, DEPTH, FORMAT)
    if FORMAT == "bf16" or FORMAT == "f32":
        return codes.to(tl.float32)
    else:
        if FORMAT == "fp4_row32":
            decoded = decode_e2m1(unpack(codes, ROWS, DEPTH))
        else:
            decoded = decode_e4m3(codes)
        scale = decode_ue8m0(load_scale_tile(scales, n, k_start, N, K, DEPTH, FORMAT))
        return scale_groups(decoded, scale, ROWS, DEPTH, 32)
