"""Hyper-connection sites: sums over chunks of a row's columns by many programs, then one program per row.

`project_kernel` leaves a chunk's share of the site's 2m + m*m projections and of the sum of squares, of ROWS rows at a
time. `finish_kernel` adds the shares in the order of the columns and makes the coefficients and the collapsed (and normed)
row. A post step before them is hyper_connection_post's own launch.

The shares need no memory of their own: they lie in the row of the output that `finish_kernel` writes last. Products of
BF16 streams are exact: the float32 projection is cut into three BF16 parts that add up to it. Neither chunks nor the
order of any sum depend on how many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, quantise_groups, valid_rows
from deepinfer_triton.ops.stream_collapse import collapse
from deepinfer_triton.rows import tile_width
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.targets import Target

ROWS, CHUNK = 16, 256


@triton.jit
def project(values, weight, WIDE: tl.constexpr):
    """float32 [rows, K] times float32 [N, K] transposed; unless WIDE, values are BF16 numbers."""
    if WIDE:
        return tl.dot(values, tl.trans(weight), input_precision="ieee")
    else:
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        exact = values.to(tl.bfloat16)
        sums = tl.dot(exact, tl.trans(low))
        sums = tl.dot(exact, tl.trans(middle), sums)
        return tl.dot(exact, tl.trans(high), sums)


@triton.jit(do_not_specialize=["rows"])
def project_kernel(
    streams, fn, count, rows, shares, share_pitch,
    WIDTH: tl.constexpr, MIXES: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    last = valid_rows(count, rows)
    if tl.program_id(1) * ROWS < last:
        t = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column, mix = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, SHARE)
        valid, inside = t < last, column < WIDTH
        values = tl.load(streams + t[:, None] * WIDTH + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        values = values.to(tl.float32)
        there = (mix < MIXES)[:, None] & inside[None, :]
        weight = tl.load(fn + mix[:, None] * WIDTH + column[None, :], mask=there, other=0.0)
        sums = project(values, weight, WIDE)
        squares = tl.sum(values * values, axis=1)
        sums = tl.where((mix == MIXES)[None, :], squares[:, None], sums)
        share_at = shares.to(tl.pointer_type(tl.float32)) + t[:, None] * share_pitch + chunk * SHARE + mix[None, :]
        tl.store(share_at, sums, mask=valid[:, None] & (mix <= MIXES)[None, :])


@triton.jit
def add_shares(shares, mix, valid, CHUNKS: tl.constexpr, CP: tl.constexpr, SHARE: tl.constexpr):
    """float32 sums over all chunks of the mixes at int32 [n]."""
    chunk = tl.arange(0, CP)
    there = (chunk < CHUNKS)[:, None] & valid[None, :]
    return tl.sum(tl.load(shares + chunk[:, None] * SHARE + mix[None, :], mask=there, other=0.0), axis=0)


@triton.jit
def sinkhorn(logits, inside, eps, ITERATIONS: tl.constexpr):
    """Row softmax + eps of the valid part of a tile [MP, MP], then alternating division by column and row sums."""
    masked = tl.where(inside, logits, float("-inf"))
    highest = tl.max(masked, axis=1)
    raised = tl.where(inside, tl.exp(masked - tl.where(highest > float("-inf"), highest, 0.0)[:, None]), 0.0)
    sums = tl.sum(raised, axis=1)
    k = tl.where(inside, raised / tl.where(sums > 0, sums, 1.0)[:, None] + eps, 0.0)
    k = k / (tl.sum(k, axis=0) + eps)[None, :]
    for _ in range(ITERATIONS - 1):
        k = k / (tl.sum(k, axis=1) + eps)[:, None]
        k = k / (tl.sum(k, axis=0) + eps)[None, :]
    return k


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(
    streams, base, scale, pre_prev, norm_weight, rms_eps, hc_eps, count, rows, shares, share_pitch,
    out, codes, scales, pre, post, comb,
    M: tl.constexpr, MP: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, ITERATIONS: tl.constexpr,
    SHARE: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    if t < valid_rows(count, rows):
        column = tl.arange(0, TILE)
        inside = column < H
        value = narrow(collapse(streams, pre_prev, t, column, inside, M, H), out.dtype.element_ty).to(tl.float32)
        mine = shares.to(tl.pointer_type(tl.float32)) + t * share_pitch
        site, cell = tl.arange(0, MP), tl.arange(0, MP * MP)
        site_valid, cell_valid = site < M, (cell // MP < M) & (cell % MP < M)
        cell_index = 2 * M + cell // MP * M + cell % MP
        one = tl.arange(0, 1)
        squares = tl.sum(add_shares(mine, one + (2 + M) * M, one == 0, CHUNKS, CP, SHARE), axis=0)
        pre_sum = add_shares(mine, site, site_valid, CHUNKS, CP, SHARE)
        post_sum = add_shares(mine, M + site, site_valid, CHUNKS, CP, SHARE)
        comb_sum = add_shares(mine, cell_index, cell_valid, CHUNKS, CP, SHARE)
        factor = tl.rsqrt(squares / (M * H) + rms_eps)
        z = pre_sum * factor * tl.load(scale) + tl.load(base + site, mask=site_valid, other=0.0)
        pre_value = 1.0 / (1.0 + tl.exp(-z)) + hc_eps
        z = post_sum * factor * tl.load(scale + 1) + tl.load(base + M + site, mask=site_valid, other=0.0)
        post_value = 2.0 / (1.0 + tl.exp(-z))
        z = comb_sum * factor * tl.load(scale + 2) + tl.load(base + cell_index, mask=cell_valid, other=0.0)
        square = tl.reshape(cell_valid.to(tl.int32), (MP, MP)) != 0
        mixed = sinkhorn(tl.reshape(z, (MP, MP)), square, hc_eps, ITERATIONS)
        tl.debug_barrier()  # the shares lie in out's row, and pre may be the storage of pre_prev: all have been read
        tl.store(pre + t * M + site, pre_value, mask=site_valid)
        tl.store(post + t * M + site, post_value, mask=site_valid)
        tl.store(comb + t * (M * M) + site[:, None] * M + site[None, :], mixed, mask=square)
        if norm_weight is not None:
            norm = tl.rsqrt(tl.sum(value * value, axis=0) / H + rms_eps)
            weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
            value = narrow(weight * value * norm, out.dtype.element_ty).to(tl.float32)
        tl.store(out + t * H + column, narrow(value, out.dtype.element_ty), mask=inside)
        if codes is not None:
            code, code_scale = quantise_groups(tl.reshape(value, (TILE // 32, 32)), "fp8_32")
            tl.store(codes + t * H + column, tl.reshape(code, (TILE,)).to(tl.uint8), mask=inside)
            group = tl.arange(0, TILE // 32)
            tl.store(scales + t * (H // 32) + group, code_scale.to(tl.uint8), mask=group < H // 32)


def mix(
    target: Target, fn, base, scale, pre_prev, norm_weight, rms_eps, hc_eps, iterations, count, streams, out, codes, scales,
    pre, post, comb,
) -> None:  # fmt: skip
    """A site's coefficients and collapsed input, and with norm_weight its norm and codes."""
    rows, m, hidden = streams.shape
    mixes = (2 + m) * m
    share, chunks = next_power_of_2(mixes + 1), cdiv(m * hidden, CHUNK)
    shares, pitch = out, hidden * out.dtype.itemsize // 4
    if chunks * share > pitch:  # rows too short to hold their shares: no model's
        shares, pitch = torch.empty(rows, chunks * share, dtype=torch.float32, device=out.device), chunks * share
    launch(
        project_kernel, (chunks, cdiv(rows, ROWS)), streams, fn, count, rows, shares, pitch,
        WIDTH=m * hidden, MIXES=mixes, SHARE=share, ROWS=ROWS, CHUNK=CHUNK,
        WIDE=target.dot == "f32" or streams.dtype == torch.float32,
    )  # fmt: skip
    launch(
        finish_kernel, (rows,), streams, base, scale, pre_prev, norm_weight, rms_eps, hc_eps, count, rows, shares, pitch,
        out, codes, scales, pre, post, comb,
        M=m, MP=next_power_of_2(m), H=hidden, TILE=tile_width(hidden), ITERATIONS=iterations,
        SHARE=share, CHUNKS=chunks, CP=next_power_of_2(chunks), warps=8 if hidden > 1024 else 4,
    )  # fmt: skip
