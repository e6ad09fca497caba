"""ep_combine: a rank shows the rows of its experts, all meet, and each sums the rows of its own tokens where they lie.

Three launches: rows with their sources into the own window; flags, and whether every row that `inverse` speaks of is where it
says; the sum, in the order of choices. One rank needs no first, and reads its own arguments.
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
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["me"])
def show_rows_kernel(
    bases, me, state, rows, received, source, ROWS_AT: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr,
    SOURCE: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Records of rows: the row, and from SOURCE on the rank and pair that it came from."""
    overlap()
    total = tl.load(received)
    if total.to(tl.int64) * RECORD <= HALF:
        first = half_of(bases, me, tl.load(state) + 1, ROWS_AT, HALF)
        for number in range(tl.program_id(0), total, tl.num_programs(0)):
            row = tl.full((), 0, tl.int64) + number
            record = first + row * RECORD
            to = values_at(record, rows.dtype.element_ty)
            for start in tl.static_range(0, H, TILE):
                column = start + tl.arange(0, TILE)
                tl.store(to + column, tl.load(rows + row * H + column, mask=column < H), mask=column < H)
            part = tl.arange(0, 2)
            tl.store(words_at(record + SOURCE) + part, tl.load(source + 2 * row + part))


@triton.jit(do_not_specialize=["me", "tag", "deadline", "height"])
def meet_kernel(
    bases, me, state, tag, deadline, received, source, inverse, count, height, K: tl.constexpr, W: tl.constexpr,
    RANKS: tl.constexpr, ROWS_AT: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr, SOURCE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The meeting, and the check that each awaited row is among those received where it went, and names this pair."""
    overlap()
    total = tl.load(received)
    met = tl.full((), 1, tl.int32)
    if tl.load(state + 1) == 0:
        set_status(state, OK, 0, 0, 0, 0)
        if W > 1:
            met = come_together(bases, me, state, tag, total, 0, deadline, W, RANKS)
            if met == 1:
                every = tl.arange(0, RANKS)
                shown = tl.load(words_at(header_of(bases, me, tl.load(state), every)) + 1, mask=every < W, other=0, volatile=True)
                overfull = tl.min(tl.where(shown.to(tl.int64) * RECORD > HALF, every, W), axis=0)
                if overfull < W:
                    rows = tl.sum(tl.where(every == overfull, shown, 0), axis=0)
                    set_status(state, NO_WINDOW_ROOM, overfull, rows, HALF // RECORD, 0)
                    met = tl.full((), 0, tl.int32)
        if met == 1:
            pairs = valid_rows(count, height) * K
            _check_back(bases, me, state, total, source, inverse, pairs, K, W, ROWS_AT, HALF, RECORD, SOURCE, TILE)


@triton.jit
def _check_back(
    bases, me, state, total, source, inverse, pairs, K: tl.constexpr, W: tl.constexpr, ROWS_AT: tl.constexpr,
    HALF: tl.constexpr, RECORD: tl.constexpr, SOURCE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    call = tl.load(state)
    lost = tl.full((), 0x7FFFFFFF, tl.int32)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        rank = tl.load(inverse + 2 * pair, mask=pair < pairs, other=-1)
        row = tl.load(inverse + 2 * pair + 1, mask=pair < pairs, other=-1)
        there = (rank >= 0) & (rank < W) & (row >= 0)
        safe = tl.where(there, rank, 0)
        if W > 1:
            there = there & (row < tl.load(words_at(header_of(bases, me, call, safe)) + 1, volatile=True))
            at = words_at(half_of(bases, safe, call, ROWS_AT, HALF) + row.to(tl.int64) * RECORD + SOURCE)
        else:
            there = there & (row < total)
            at = source + 2 * row.to(tl.int64)
        named = (tl.load(at, mask=there, other=-1) == me) & (tl.load(at + 1, mask=there, other=-1) == pair)
        astray = (pair < pairs) & (rank >= 0) & ((there & named) == 0)
        lost = tl.minimum(lost, tl.min(tl.where(astray, pair, 0x7FFFFFFF), axis=0))
    if lost < 0x7FFFFFFF:
        set_status(state, NOT_BACK, lost // K, lost % K, tl.load(inverse + 2 * lost), tl.load(inverse + 2 * lost + 1))


@triton.jit(do_not_specialize=["height"])
def sum_kernel(
    bases, state, rows, inverse, weights, shared, count, height, out, K: tl.constexpr, W: tl.constexpr, ROWS_AT: tl.constexpr,
    HALF: tl.constexpr, RECORD: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
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
            row = tl.load(inverse + 2 * (t * K + j) + 1).to(tl.int64)
            if W > 1:
                record = half_of(bases, tl.maximum(rank, 0), call, ROWS_AT, HALF) + row * RECORD
                values = values_at(record, rows.dtype.element_ty)
            else:
                values = rows + row * H
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
    halves = {name: places[name] for name in ("ROWS_AT", "HALF")}
    own = (windows.bases, windows.rank, windows.state)
    if world > 1:
        tile = min(triton.next_power_of_2(hidden), target.row_columns)
        launch(
            show_rows_kernel, (min(rows.shape[0], COPY_PROGRAMS),), *own, rows, received, source, SOURCE=at, H=hidden, TILE=tile,
            **halves, **record, early=True,
        )  # fmt: skip
    launch(
        meet_kernel, (1,), *own, tag(told), nanoseconds(comm), received, source, inverse, count, height, K=k,
        RANKS=triton.next_power_of_2(world), SOURCE=at, TILE=PAIR_TILE, **places, **record,
        early=True,
    )  # fmt: skip
    settled = windows.meeting(comm, "ep_combine", told)
    tile = min(target.columns, triton.next_power_of_2(hidden))
    launch(
        sum_kernel, (height, triton.cdiv(hidden, tile)), windows.bases, windows.state, rows, inverse, weights, shared, count,
        height, out, K=k, H=hidden, TILE=tile, unfused=True, **places, **record,
        early=True,
    )  # fmt: skip
    settled()


MAKERS = [offer("ep_combine", ep_combine)]
