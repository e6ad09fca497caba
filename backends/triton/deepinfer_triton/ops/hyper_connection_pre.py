"""hyper_connection_pre: one program per row.

Projections and the mean square are summed over tiles of fixed width in one order, then the Sinkhorn iterations run on
an [m, m] tile, and the row is collapsed with the coefficients of the site before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.ops.stream_collapse import collapse
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


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


@triton.jit
def project(fn, index, valid, column, inside, values, WIDTH: tl.constexpr):
    """Partial products of rows `index` of fn with a tile of values: [rows, TILE], not yet summed."""
    at = fn + index[:, None] * WIDTH + column[None, :]
    return tl.load(at, mask=valid[:, None] & inside[None, :], other=0.0) * values[None, :]


@triton.jit(do_not_specialize=["rows"])
def hyper_connection_pre_kernel(
    streams, fn, base, scale, pre_prev, rms_eps, hc_eps, count, rows, out, pre, post, comb,
    M: tl.constexpr, MP: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    WIDTH: tl.constexpr = M * H
    if t < valid_rows(count, rows):
        site = tl.arange(0, MP)
        cell = tl.arange(0, MP * MP)
        cell_row, cell_column = cell // MP, cell % MP
        site_valid, cell_valid = site < M, (cell_row < M) & (cell_column < M)
        cell_index = 2 * M + cell_row * M + cell_column
        squares = tl.zeros([TILE], tl.float32)
        pre_sum = tl.zeros([MP], tl.float32)
        post_sum = tl.zeros([MP], tl.float32)
        comb_sum = tl.zeros([MP * MP], tl.float32)
        for start in range(0, WIDTH, TILE):
            column = start + tl.arange(0, TILE)
            inside = column < WIDTH
            value = tl.load(streams + t * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            squares += value * value
            pre_sum += tl.sum(project(fn, site, site_valid, column, inside, value, WIDTH), axis=1)
            post_sum += tl.sum(project(fn, M + site, site_valid, column, inside, value, WIDTH), axis=1)
            comb_sum += tl.sum(project(fn, cell_index, cell_valid, column, inside, value, WIDTH), axis=1)
        factor = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + rms_eps)
        z = pre_sum * factor * tl.load(scale) + tl.load(base + site, mask=site_valid, other=0.0)
        pre_value = 1.0 / (1.0 + tl.exp(-z)) + hc_eps
        z = post_sum * factor * tl.load(scale + 1) + tl.load(base + M + site, mask=site_valid, other=0.0)
        post_value = 2.0 / (1.0 + tl.exp(-z))
        z = comb_sum * factor * tl.load(scale + 2) + tl.load(base + cell_index, mask=cell_valid, other=0.0)
        square = tl.reshape(cell_valid.to(tl.int32), (MP, MP)) != 0
        mixed = sinkhorn(tl.reshape(z, (MP, MP)), square, hc_eps, ITERATIONS)
        for start in range(0, H, TILE):  # reads pre_prev before pre, which may be the same storage, is written
            column = start + tl.arange(0, TILE)
            value = collapse(streams, pre_prev, t, column, column < H, M, H)
            tl.store(out + t * H + column, narrow(value, out.dtype.element_ty), mask=column < H)
        tl.debug_barrier()
        tl.store(pre + t * M + site, pre_value, mask=site_valid)
        tl.store(post + t * M + site, post_value, mask=site_valid)
        at = comb + t * (M * M) + site[:, None] * M + site[None, :]
        tl.store(at, mixed, mask=square)


def hyper_connection_pre(
    target: Target, streams, fn, base, scale, pre_prev, rms_eps, hc_eps, iterations, count, out, pre, post, comb
) -> None:
    rows, m, hidden = streams.shape
    tile = min(target.columns // 2, triton.next_power_of_2(hidden))
    launch(
        hyper_connection_pre_kernel, (rows,), streams, fn, base, scale, pre_prev, rms_eps, hc_eps, count, rows,
        out, pre, post, comb,
        M=m, MP=triton.next_power_of_2(m), H=hidden, TILE=tile, ITERATIONS=iterations, warps=8,
    )  # fmt: skip


MAKERS = [offer("hyper_connection_pre", hyper_connection_pre, supports=serves(streams=DENSE, out=DENSE))]
