"""The one tile of every GEMM: FEATURES weight rows times TOKENS activation rows over all of K, in a fixed order.

The product is made transposed, y^T = W x^T, so that the weights fill the matrix unit's long side at any token count:
a 64-row side would make `tl.dot_scaled` fall back to BF16 on SM100. Neither tile nor order of summation depends on
how many rows a call has, so a row's bits are its own.

DOT says how quantised operands meet (`targets.Target.dot`). Exactness does not depend on it: every code times its scale
is a BF16 number, and all sums are FP32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.numeric import decode_e4m3, decode_ue8m0, narrow, quantise_groups, scale_groups
from deepinfer_triton.weights import load_code_tile, load_scale_tile, load_weight_tile


@triton.jit
def load_activation_tile(
    x, x_scale, stride, t, valid, k_start, K: tl.constexpr, SCALES_ROW: tl.constexpr, TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """float32 [TOKENS, DEPTH] of rows t, dense or fp8_32 with SCALES_ROW scales a row; zeros outside."""
    column = k_start + tl.arange(0, DEPTH)
    inside = valid[:, None] & (column < K)[None, :]
    loaded = tl.load(x + t[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0)
    if x_scale is None:
        return loaded.to(tl.float32)
    else:
        group = k_start // 32 + tl.arange(0, DEPTH // 32)
        at = x_scale + t[:, None].to(tl.int64) * SCALES_ROW + group[None, :]
        scale = tl.load(at, mask=valid[:, None] & (group < K // 32)[None, :], other=127)
        values = decode_e4m3(loaded)
        return scale_groups(values, decode_ue8m0(scale), TOKENS, DEPTH, 32)


@triton.jit
def multiply_scaled(
    acc, x, x_scale, stride, t, valid, values, scales, n, k_start,
    N: tl.constexpr, K: tl.constexpr, SCALES_ROW: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """acc + W x^T over one step of K, codes and scales going to the matrix unit as they are."""
    column = k_start + tl.arange(0, DEPTH)
    inside = valid[:, None] & (column < K)[None, :]
    codes = tl.load(x + t[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0)
    group = k_start // 32 + tl.arange(0, DEPTH // 32)
    at = x_scale + t[:, None].to(tl.int64) * SCALES_ROW + group[None, :]
    x_codes = tl.load(at, mask=valid[:, None] & (group < K // 32)[None, :], other=127)
    w = load_code_tile(values, n, k_start, N, K, DEPTH, FORMAT)
    w_codes = load_scale_tile(scales, n, k_start, N, K, DEPTH, FORMAT)
    rhs = tl.trans(codes.to(tl.float8e4nv, bitcast=True))
    if FORMAT == "fp4_row32":
        return tl.dot_scaled(w, w_codes, "e2m1", rhs, x_codes, "e4m3", acc)
    else:
        return tl.dot_scaled(w.to(tl.float8e4nv, bitcast=True), w_codes, "e4m3", rhs, x_codes, "e4m3", acc)


@triton.jit
def product_tile(
    x, x_scale, stride, t, valid, values, scales, n,
    N: tl.constexpr, K: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
    FORMAT: tl.constexpr, DOT: tl.constexpr, SCALES_ROW: tl.constexpr = None, PRECISE: tl.constexpr = False,
):  # fmt: skip
    """float32 [FEATURES, TOKENS]: rows n of a matrix [N, K] times activation rows t.

    SCALES_ROW: scales in a whole row of x, where K columns are only a part of it. PRECISE: the result keeps all bits of
    the sum, so steps of DEPTH are added up outside the matrix unit. Hopper's cuts what it adds instead of rounding, always
    towards zero, which over K = 5120 is twice what the card allows a float32 result.
    """
    PITCH: tl.constexpr = K // 32 if SCALES_ROW is None else SCALES_ROW
    acc = tl.zeros([FEATURES, TOKENS], tl.float32)
    for k_start in range(0, K, DEPTH):
        if DOT == "scaled":
            acc = multiply_scaled(
                acc, x, x_scale, stride, t, valid, values, scales, n, k_start, N, K, PITCH, DEPTH, FORMAT
            )
        else:
            w = load_weight_tile(values, scales, n, k_start, N, K, FEATURES, DEPTH, FORMAT)
            rows = load_activation_tile(x, x_scale, stride, t, valid, k_start, K, PITCH, TOKENS, DEPTH)
            if DOT == "bf16":
                if PRECISE:  # an addition would be folded back into the product, fma is not
                    acc = tl.fma(tl.dot(w.to(tl.bfloat16), tl.trans(rows.to(tl.bfloat16))), 1.0, acc)
                else:
                    acc = tl.dot(w.to(tl.bfloat16), tl.trans(rows.to(tl.bfloat16)), acc)
            else:
                acc = tl.dot(w, tl.trans(rows), acc, input_precision="ieee")
    return acc


@triton.jit
def store_tile(
    acc, out, out_scale, stride, t, valid, n, n_tile,
    N: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Rounds the tile once into rows t of out, or quantises it to fp8_32 straight from the sums."""
    row = t.to(tl.int64)
    if out_scale is None:
        at = out + row[None, :] * stride + n[:, None]
        tl.store(at, narrow(acc, out.dtype.element_ty), mask=valid[None, :] & (n < N)[:, None])
    else:
        GROUPS: tl.constexpr = FEATURES // 32
        grouped = tl.reshape(tl.trans(acc), (TOKENS * GROUPS, 32))
        code, scale = quantise_groups(grouped, "fp8_32")
        column = n_tile * FEATURES + tl.arange(0, FEATURES)
        at = out + row[:, None] * stride + column[None, :]
        codes = tl.reshape(code, (TOKENS, FEATURES)).to(tl.uint8)
        tl.store(at, codes, mask=valid[:, None] & (column < N)[None, :])
        group = n_tile * GROUPS + tl.arange(0, GROUPS)
        at = out_scale + row[:, None] * (N // 32) + group[None, :]
        scales = tl.reshape(scale, (TOKENS, GROUPS)).to(tl.uint8)
        tl.store(at, scales, mask=valid[:, None] & (group < N // 32)[None, :])


def dot_of(target_dot: str, x_format: str, weight_format: str) -> str:
    """How this pair of operands meets on a target: float32 on either side stays float32, two quantised ones may be
    scaled.
    """
    if "f32" in (x_format, weight_format, target_dot):
        return "f32"
    if target_dot == "scaled" and x_format == "u8" and weight_format != "bf16":
        return "scaled"
    return "bf16"
