"""ep_combine: a rank sends the rows of its experts to the windows of their tokens' ranks, all meet, and each sums its own.

Three launches: each row, with a mark of the call, into the place of its pair; flags, and whether every row that `inverse`
speaks of has come; the sum, in the order of choices. One rank needs no first, and reads its own arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl
from deepinfer_hal.ops._communication import spell

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.ranks.dispatch import COPY_PROGRAMS, PAIR_TILE
from deepinfer_triton.ranks.meeting import (
    NO_WINDOW_ROOM,
    NOT_BACK,
    OK,
    come_together,
    half_of,
    header_of,
    set_status,
    values_at,
    words_at,
)
from deepinfer_triton.ranks.offer import offer
from deepinfer_triton.ranks.windows import nanoseconds, tag, windows_of
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["me"])
def send_rows_kernel(
    bases, me, state, rows, received, source, W: tl.constexpr, ROWS_AT: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr,
    MARK: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Records of pairs: the row, and from MARK on the call, this rank and the row's number. What a window has no room for is
    left out: it is refused where it is missed."""
    overlap()
    total, call = tl.load(received), tl.load(state) + 1
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + number
        rank, pair = tl.load(source + 2 * row), tl.load(source + 2 * row + 1).to(tl.int64)
        if (rank >= 0) & (rank < W) & (pair >= 0) & ((pair + 1) * RECORD <= HALF):
            record = half_of(bases, rank, call, ROWS_AT, HALF) + pair * RECORD
            to = values_at(record, rows.dtype.element_ty)
            for start in tl.static_range(0, H, TILE):
                column = start + tl.arange(0, TILE)
                tl.store(to + column, tl.load(rows + row * H + column, mask=column < H), mask=column < H)
            mark = words_at(record + MARK)
            tl.store(mark, call)
            tl.store(mark + 1, me)
            tl.store(mark + 2, number)


@triton.jit(do_not_specialize=["me", "tag", "deadline", "height"])
def meet_kernel(
    bases, me, state, tag, deadline, received, source, inverse, count, height, K: tl.constexpr, W: tl.constexpr,
    RANKS: tl.constexpr, ROWS_AT: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr, MARK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The meeting, and the check that each awaited row has come from where it went."""
    overlap()
    pairs = valid_rows(count, height) * K
    met = tl.full((), 1, tl.int32)
    if tl.load(state + 1) == 0:
        set_status(state, OK, 0, 0, 0, 0)
        if W > 1:
            met = come_together(bases, me, state, tag, pairs, 0, deadline, W, RANKS)
            if met == 1:
                every = tl.arange(0, RANKS)
                told = words_at(header_of(bases, me, tl.load(state), every)) + 1
                needed = tl.load(told, mask=every < W, other=0, volatile=True)
                overfull = tl.min(tl.where(needed.to(tl.int64) * RECORD > HALF, every, W), axis=0)
                if overfull < W:
                    most = tl.sum(tl.where(every == overfull, needed, 0), axis=0)
                    set_status(state, NO_WINDOW_ROOM, overfull, most, HALF // RECORD, 0)
                    met = tl.full((), 0, tl.int32)
        if met == 1:
            _check_back(bases, me, state, tl.load(received), source, inverse, pairs, K, W, ROWS_AT, HALF, RECORD, MARK, TILE)


@triton.jit
def _check_back(
    bases, me, state, total, source, inverse, pairs, K: tl.constexpr, W: tl.constexpr, ROWS_AT: tl.constexpr,
    HALF: tl.constexpr, RECORD: tl.constexpr, MARK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    call = tl.load(state)
    lost = tl.full((), 0x7FFFFFFF, tl.int32)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        rank = tl.load(inverse + 2 * pair, mask=pair < pairs, other=-1)
        row = tl.load(inverse + 2 * pair + 1, mask=pair < pairs, other=-1)
        awaited = (pair < pairs) & (rank >= 0)
        if W > 1:
            mark = words_at(half_of(bases, me, call, ROWS_AT, HALF) + pair.to(tl.int64) * RECORD + MARK)
            back = tl.load(mark, mask=awaited, other=0, volatile=True) == call
            back = back & (tl.load(mark + 1, mask=awaited, other=-1, volatile=True) == rank)
            back = back & (tl.load(mark + 2, mask=awaited, other=-1, volatile=True) == row)
        else:
            there = awaited & (rank == 0) & (row >= 0) & (row < total)
            at = source + 2 * row.to(tl.int64)
            back = (tl.load(at, mask=there, other=-1) == me) & (tl.load(at + 1, mask=there, other=-1) == pair)
        lost = tl.minimum(lost, tl.min(tl.where(awaited & (back == 0), pair, 0x7FFFFFFF), axis=0))
    if lost < 0x7FFFFFFF:
        set_status(state, NOT_BACK, lost // K, lost % K, tl.load(inverse + 2 * lost), tl.load(inverse + 2 * lost + 1))


@triton.jit(do_not_specialize=["me", "height"])
def sum_kernel(
    bases, me, state, rows, inverse, weights, shared, count, height, out, K: tl.constexpr, W: tl.constexpr,
    ROWS_AT: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    overlap()
    t = tl.program_id(0).to(tl.int64)
    if (tl.load(state + 2) == OK) & (t < valid_rows(count, height)):
        call = tl.load(state)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < H
        total = tl.zeros([TILE], tl.float32)
        for j in tl.static_range(K):
            rank = tl.load(inverse + 2 * (t * K + j))
            if W > 1:
                record = half_of(bases, me, call, ROWS_AT, HALF) + (t * K + j) * RECORD
                values = values_at(record, rows.dtype.element_ty)
            else:
                values = rows + tl.load(inverse + 2 * (t * K + j) + 1).to(tl.int64) * H
            value = tl.load(values + column, mask=inside & (rank >= 0), other=0.0).to(tl.float32)
            if weights is not None:
                value = tl.where(rank >= 0, value * tl.load(weights + t * K + j), 0.0)
            total += value
        if shared is not None:
            total += tl.load(shared + t * H + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + t * H + column, narrow(total, out.dtype.element_ty), mask=inside)


def ep_combine(target: Target, comm, rows, received, source, inverse, weights, shared, count, out) -> None:
    height, hidden = out.shape
    k, told = inverse.shape[1], f"ep_combine({spell(rows, rows=False)})"
    windows = windows_of(comm, rows.device, told)
    at = -(-hidden * rows.element_size() // 16) * 16
    record = {"RECORD": at + 16}
    places, world = windows.places(), windows.ranks
    own = (windows.bases, windows.rank, windows.state)
    if world > 1:
        tile = min(next_power_of_2(hidden), target.row_columns)
        launch(
            send_rows_kernel, (min(rows.shape[0], COPY_PROGRAMS),), *own, rows, received, source, MARK=at, H=hidden, TILE=tile,
            **places, **record, early=True,
        )  # fmt: skip
    launch(
        meet_kernel, (1,), *own, tag(told), nanoseconds(comm), received, source, inverse, count, height, K=k,
        RANKS=next_power_of_2(world), MARK=at, TILE=PAIR_TILE // 2, **places, **record, early=True,
    )  # fmt: skip
    settled = windows.meeting(comm, "ep_combine", told)
    tile = min(target.columns, next_power_of_2(hidden))
    launch(
        sum_kernel, (height, cdiv(hidden, tile)), *own, rows, inverse, weights, shared, count, height, out, K=k, H=hidden,
        TILE=tile, unfused=True, **places, **record, early=True,
    )  # fmt: skip
    settled()


MAKERS = [offer("ep_combine", ep_combine)]
