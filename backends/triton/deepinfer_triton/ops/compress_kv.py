"""compress_kv: groups are pooled first, then the carry ring takes this step's tokens; a group may need what they replace.

A program has one group, or one token row, and a tile of channels. Where a group's token lies (this step's rows or the
ring) is found on the device from its position alone, so a group's bits do not depend on where steps begin.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit
def load_member(
    value, value_stride, gate, gate_stride, carry, slot, start, first, position, column, inside,
    LENGTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """(value, gate), float32 [TILE], of a request's token at `position`; its row `start` has position `first`."""
    fresh = position >= first
    row = (start + tl.where(fresh, position - first, 0)).to(tl.int64)
    here, there = inside & fresh, inside & (position < first)
    kept = carry + (slot.to(tl.int64) * LENGTH + position % LENGTH) * (2 * D) + column
    v = tl.load(value + row * value_stride + column, mask=here, other=0.0) + tl.load(kept, mask=there, other=0.0)
    g = tl.load(gate + row * gate_stride + column, mask=here, other=0.0) + tl.load(kept + D, mask=there, other=0.0)
    return v, g


@triton.jit
def pool_kernel(
    value, value_stride, gate, gate_stride, positions, row_to_req, cu_q, state_slots, complete, carry, out,
    RATIO: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    last = tl.load(complete + group)
    if last >= 0:
        request = tl.load(row_to_req + last)
        start = tl.load(cu_q + request)
        slot = tl.maximum(tl.load(state_slots + request), 0)
        end, first = tl.load(positions + last), tl.load(positions + start)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < D
        highest = tl.full([TILE], float("-inf"), tl.float32)
        for i in tl.static_range(RATIO):
            v, g = load_member(
                value, value_stride, gate, gate_stride, carry, slot, start, first, end - (RATIO - 1 - i), column, inside,
                LENGTH, D,
            )  # fmt: skip
            highest = tl.maximum(highest, g)
        total = tl.zeros([TILE], tl.float32)
        weights = tl.zeros([TILE], tl.float32)
        for i in tl.static_range(RATIO):
            v, g = load_member(
                value, value_stride, gate, gate_stride, carry, slot, start, first, end - (RATIO - 1 - i), column, inside,
                LENGTH, D,
            )  # fmt: skip
            weight = tl.exp(g - highest)
            total += weight * v
            weights += weight
        at = out + group.to(tl.int64) * D + column
        tl.store(at, narrow(total / weights, out.dtype.element_ty), mask=inside)


@triton.jit
def carry_kernel(
    value, value_stride, gate, gate_stride, positions, row_to_req, cu_q, state_slots, carry,
    LENGTH: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request = tl.load(row_to_req + row)
    if request >= 0:
        slot = tl.load(state_slots + request)
        begin, end = tl.load(cu_q + request), tl.load(cu_q + request + 1)
        if (slot >= 0) & (row >= begin) & (row < end) & (row >= end - LENGTH):
            column = tl.program_id(1) * TILE + tl.arange(0, TILE)
            inside = column < D
            kept = carry + (slot.to(tl.int64) * LENGTH + tl.load(positions + row) % LENGTH) * (2 * D) + column
            at = row.to(tl.int64)
            tl.store(kept, tl.load(value + at * value_stride + column, mask=inside), mask=inside)
            tl.store(kept + D, tl.load(gate + at * gate_stride + column, mask=inside), mask=inside)


def compress_kv(
    target: Target, value, gate, positions, row_to_req, cu_q, state_slots, complete, ratio, carry, out
) -> None:
    rows, width = value.shape
    if state_slots.shape[0] == 0:
        return
    tile = min(target.columns, next_power_of_2(width))
    tiles, sources = cdiv(width, tile), (value, value.stride(0), gate, gate.stride(0))
    launch(
        pool_kernel, (complete.shape[0], tiles), *sources, positions, row_to_req, cu_q, state_slots, complete, carry, out,
        RATIO=ratio, LENGTH=carry.shape[1], D=width, TILE=tile,
    )  # fmt: skip
    launch(
        carry_kernel, (rows, tiles), *sources, positions, row_to_req, cu_q, state_slots, carry,
        LENGTH=carry.shape[1], D=width, TILE=tile,
    )  # fmt: skip


MAKERS = [offer("compress_kv", compress_kv, supports=serves(out=DENSE))]
