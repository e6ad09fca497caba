"""engram_gate: one program per row and stream holds both the stream and its key while the gate is found."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.sizes import next_power_of_2
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def engram_gate_kernel(
    kv, kv_stride, q_weight, k_weight, eps, count, rows, streams, M: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr
):
    t, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if t < valid_rows(count, rows):
        lane = tl.arange(0, TILE)
        products = tl.zeros([TILE], tl.float32)
        stream_squares = tl.zeros([TILE], tl.float32)
        key_squares = tl.zeros([TILE], tl.float32)
        for start in range(0, H, TILE):
            column = start + lane
            inside = column < H
            old = tl.load(streams + (t * M + j) * H + column, mask=inside, other=0.0).to(tl.float32)
            key = tl.load(kv + t * kv_stride + j * H + column, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(q_weight + j * H + column, mask=inside, other=0.0).to(tl.float32)
            weight *= tl.load(k_weight + j * H + column, mask=inside, other=0.0).to(tl.float32)
            products += old * weight * key
            stream_squares += old * old
            key_squares += key * key
        dot = tl.sum(products, axis=0)
        dot *= tl.rsqrt(tl.sum(stream_squares, axis=0) / H + eps)
        dot *= tl.rsqrt(tl.sum(key_squares, axis=0) / H + eps)
        dot *= tl.rsqrt(H * 1.0)
        root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
        gate = 1.0 / (1.0 + tl.exp(-tl.where(dot > 0, root, tl.where(dot < 0, -root, dot))))
        for start in range(0, H, TILE):
            column = start + lane
            inside = column < H
            at = streams + (t * M + j) * H + column
            old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(kv + t * kv_stride + M * H + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, narrow(old + gate * value, streams.dtype.element_ty), mask=inside)


def engram_gate(target: Target, kv, q_weight, k_weight, eps, count, streams) -> None:
    rows, m, hidden = streams.shape
    launch(
        engram_gate_kernel, (rows, m), kv, kv.stride(0), q_weight, k_weight, eps, count, rows, streams,
        M=m, H=hidden, TILE=min(target.columns, next_power_of_2(hidden)),
    )  # fmt: skip


MAKERS = [offer("engram_gate", engram_gate, supports=serves(streams=DENSE))]
