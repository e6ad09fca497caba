"""ep_dispatch: a rank shows its tokens, all meet, each sorts the pairs of all ranks by itself and pulls the rows for its experts.

Four launches: tokens into the own window, one record each; ids to every rank, flags, and whether all rows have room; per
expert, the rows of its pairs, counted over all ranks' ids; copies of records to rows. One rank needs no first, and reads its
own arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl
from deepinfer_hal.ops._communication import spell

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.ranks.meeting import (
    IDS_ROOM,
    NO_ROOM,
    NO_WINDOW_ROOM,
    OK,
    come_together,
    half_of,
    header_of,
    ids_from,
    pairs_from,
    set_status,
    values_at,
    words_at,
)
from deepinfer_triton.ranks.offer import offer
from deepinfer_triton.ranks.windows import nanoseconds, tag, windows_of
from deepinfer_triton.rows import tile_width
from deepinfer_triton.sizes import next_power_of_2
from deepinfer_triton.targets import Target

COPY_PROGRAMS = 2048
"""Programs that copy rows, each every COPY_PROGRAMS-th: the number of rows is known on the device alone."""

PAIR_TILE = 1024

PAIRS_AT_ONCE = 4096
"""Pairs of all ranks that a sorting program holds."""


@triton.jit(do_not_specialize=["rows", "me"])
def show_tokens_kernel(
    bases, me, state, x, x_stride, x_scale, weights, count, rows, ROWS_AT: tl.constexpr, HALF: tl.constexpr,
    RECORD: tl.constexpr, SCALES: tl.constexpr, WEIGHTS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    KS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Records of tokens: the row, its scales from SCALES on, the weights of its choices from WEIGHTS on."""
    overlap()
    n = valid_rows(count, rows)
    if (n.to(tl.int64) * RECORD <= HALF) & (n * K <= IDS_ROOM):
        first = half_of(bases, me, tl.load(state) + 1, ROWS_AT, HALF)
        for t in range(tl.program_id(0), n, tl.num_programs(0)):
            token = tl.full((), 0, tl.int64) + t
            record = first + token * RECORD
            to = values_at(record, x.dtype.element_ty)
            for start in tl.static_range(0, WIDTH, TILE):
                column = start + tl.arange(0, TILE)
                value = tl.load(x + token * x_stride + column, mask=column < WIDTH)
                tl.store(to + column, value, mask=column < WIDTH)
                if x_scale is not None:
                    group = start // 32 + tl.arange(0, TILE // 32)
                    scale = tl.load(x_scale + token * (WIDTH // 32) + group, mask=group < WIDTH // 32)
                    at = values_at(record + SCALES, tl.uint8)
                    tl.store(at + group, scale, mask=group < WIDTH // 32)
            if weights is not None:
                choice = tl.arange(0, KS)
                weight = tl.load(weights + token * K + choice, mask=choice < K)
                tl.store(values_at(record + WEIGHTS, tl.float32) + choice, weight, mask=choice < K)


@triton.jit(do_not_specialize=["rows", "me", "tag", "deadline", "room"])
def meet_kernel(
    bases, me, state, tag, deadline, ids, count, rows, room, K: tl.constexpr, E: tl.constexpr, W: tl.constexpr,
    RANKS: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ids to every rank, the meeting, and the check that what each rank is sent has room."""
    overlap()
    pairs = valid_rows(count, rows) * K
    met = tl.full((), 1, tl.int32)
    if tl.load(state + 1) == 0:
        set_status(state, OK, 0, 0, 0, 0)
        if W > 1:
            call = tl.load(state) + 1
            for rank in range(W):
                to = ids_from(ids, bases, rank, call, me, W)
                for start in range(0, tl.where(pairs <= IDS_ROOM, pairs, 0), TILE):
                    pair = start + tl.arange(0, TILE)
                    tl.store(to + pair, tl.load(ids + pair, mask=pair < pairs), mask=pair < pairs)
            met = come_together(bases, me, state, tag, pairs, room, deadline, W, RANKS)
        if met == 1:
            _check_room(bases, me, state, ids, pairs, room, K, E, W, RANKS, HALF, RECORD, TILE)


@triton.jit
def _check_room(
    bases, me, state, ids, pairs, room, K: tl.constexpr, E: tl.constexpr, W: tl.constexpr, RANKS: tl.constexpr,
    HALF: tl.constexpr, RECORD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pairs are counted by owner only where all of them together could be too many for some rank."""
    call = tl.load(state)
    every = tl.arange(0, RANKS)
    there = every < W
    sent, rooms = tl.zeros([RANKS], tl.int32) + pairs, tl.zeros([RANKS], tl.int32) + room
    if W > 1:
        header = words_at(header_of(bases, me, call, every))
        sent = tl.load(header + 1, mask=there, other=0, volatile=True)
        rooms = tl.load(header + 2, mask=there, other=0x7FFFFFFF, volatile=True)
    fits = (W == 1) | ((sent <= IDS_ROOM) & (sent.to(tl.int64) // K * RECORD <= HALF))
    overfull = tl.min(tl.where(there & (fits == 0), every, W), axis=0)
    if overfull < W:
        most = tl.minimum(tl.full((), HALF // RECORD, tl.int64), IDS_ROOM // K).to(tl.int32)
        set_status(state, NO_WINDOW_ROOM, overfull, tl.sum(tl.where(every == overfull, sent, 0), axis=0) // K, most, 0)
    elif tl.sum(tl.where(there, sent, 0), axis=0) > tl.min(rooms, axis=0):
        total = tl.zeros([RANKS], tl.int32)
        for rank in range(W):
            n = pairs_from(pairs, bases, me, call, rank, W)
            here = ids_from(ids, bases, me, call, rank, W)
            for start in range(0, n, TILE):
                pair = start + tl.arange(0, TILE)
                chosen = tl.load(here + pair, mask=pair < n, other=-1)
                owner = tl.where((chosen >= 0) & (chosen < W * E), chosen // E, -1)
                total += tl.sum((owner[:, None] == every[None, :]).to(tl.int32), axis=0)
        refuses = tl.min(tl.where((total > rooms) & there, every, W), axis=0)
        if refuses < W:
            first = every == refuses
            rows, most = tl.sum(tl.where(first, total, 0), axis=0), tl.sum(tl.where(first, rooms, 0), axis=0)
            set_status(state, NO_ROOM, refuses, rows, most, 0)


@triton.jit(do_not_specialize=["rows", "me"])
def sort_kernel(
    bases, me, state, ids, count, rows, offsets, source, inverse, K: tl.constexpr, E: tl.constexpr, W: tl.constexpr,
    RANKS: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program for each expert of all ranks numbers its pairs in order of ranks and pairs; one more marks this rank's pairs that
    have no row, and ends the offsets. Where no rank has more than EACH pairs, all are read at once."""
    overlap()
    if tl.load(state + 2) == OK:
        expert = tl.program_id(0)
        own, call = valid_rows(count, rows) * K, tl.load(state)
        owner = tl.where(expert < W * E, expert // E, me)
        most = own
        if W > 1:
            every = tl.arange(0, RANKS)
            most = tl.max(tl.load(words_at(header_of(bases, me, call, every)) + 1, mask=every < W, other=0), axis=0)
        if most <= EACH:
            _sort_at_once(bases, me, call, ids, own, expert, owner, offsets, source, inverse, E, W, RANKS, EACH)
        else:
            _sort_in_tiles(bases, me, call, ids, own, expert, owner, offsets, source, inverse, E, W, TILE)


@triton.jit
def _sort_at_once(
    bases, me, call, ids, own, expert, owner, offsets, source, inverse, E: tl.constexpr, W: tl.constexpr, RANKS: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, RANKS * EACH)
    rank, pair = index // EACH, index % EACH
    if W == 1:
        inside = pair < own
    else:
        inside = pair < tl.load(words_at(header_of(bases, me, call, rank)) + 1, mask=rank < W, other=0)
    chosen = tl.load(ids_from(ids, bases, me, call, rank, W) + pair, mask=inside, other=-1)
    lower = (chosen >= owner * E) & (chosen < tl.minimum(expert, owner * E + E))
    row = tl.sum(lower.to(tl.int32), axis=0)
    if owner == me:
        tl.store(offsets + tl.minimum(expert - owner * E, E), row)
    _number(me, chosen, rank, pair, inside, row, expert, owner, source, inverse, E, W)


@triton.jit
def _sort_in_tiles(
    bases, me, call, ids, own, expert, owner, offsets, source, inverse, E: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr
):
    before = tl.zeros([TILE], tl.int32)
    for rank in range(W):
        n = pairs_from(own, bases, me, call, rank, W)
        sent = ids_from(ids, bases, me, call, rank, W)
        for start in range(0, n, TILE):
            pair = start + tl.arange(0, TILE)
            chosen = tl.load(sent + pair, mask=pair < n, other=-1)
            before += ((chosen >= owner * E) & (chosen < tl.minimum(expert, owner * E + E))).to(tl.int32)
    row = tl.sum(before, axis=0)
    if owner == me:
        tl.store(offsets + tl.minimum(expert - owner * E, E), row)
    for rank in range(W):
        n = pairs_from(own, bases, me, call, rank, W)
        sent = ids_from(ids, bases, me, call, rank, W)
        for start in range(0, n, TILE):
            pair = start + tl.arange(0, TILE)
            chosen = tl.load(sent + pair, mask=pair < n, other=-1)
            _number(me, chosen, rank, pair, pair < n, row, expert, owner, source, inverse, E, W)
            row += tl.sum((chosen == expert).to(tl.int32), axis=0)


@triton.jit
def _number(me, chosen, rank, pair, inside, row, expert, owner, source, inverse, E: tl.constexpr, W: tl.constexpr):
    """The pairs of an expert get rows from `row` on: as source where its owner is this rank, as inverse where the pairs are."""
    one = tl.zeros_like(pair)
    if expert < W * E:
        here = (chosen == expert).to(tl.int32)
        place = row + tl.cumsum(here, axis=0) - 1
        to = source + 2 * place.to(tl.int64)
        mine = (here > 0) & (owner == me)
        tl.store(to, one + rank, mask=mine)
        tl.store(to + 1, pair, mask=mine)
        gone = (here > 0) & (one + rank == me)
        tl.store(inverse + 2 * pair, one + owner, mask=gone)
        tl.store(inverse + 2 * pair + 1, place, mask=gone)
    else:
        nowhere = inside & ((chosen < 0) | (chosen >= W * E)) & (one + rank == me)
        tl.store(inverse + 2 * pair, one - 1, mask=nowhere)
        tl.store(inverse + 2 * pair + 1, one - 1, mask=nowhere)


@triton.jit(do_not_specialize=["me"])
def pull_kernel(
    bases, me, state, x, x_stride, x_scale, weights, offsets, source, out, out_scale, out_weights, K: tl.constexpr,
    E: tl.constexpr, W: tl.constexpr, ROWS_AT: tl.constexpr, HALF: tl.constexpr, RECORD: tl.constexpr, SCALES: tl.constexpr,
    WEIGHTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copies of records, or of one rank's own arguments, to rows."""
    overlap()
    if tl.load(state + 2) == OK:
        call, total = tl.load(state), tl.load(offsets + E)
        for number in range(tl.program_id(0), total, tl.num_programs(0)):
            row = tl.full((), 0, tl.int64) + number
            pair = tl.load(source + 2 * row + 1)
            token = (pair // K).to(tl.int64)
            if W > 1:
                record = half_of(bases, tl.load(source + 2 * row), call, ROWS_AT, HALF) + token * RECORD
                values = values_at(record, x.dtype.element_ty)
                scales = values_at(record + SCALES, tl.uint8)
                weight_at = values_at(record + WEIGHTS, tl.float32) + pair % K
            else:
                values, scales, weight_at = x + token * x_stride, x_scale, weights
                if x_scale is not None:
                    scales = x_scale + token * (WIDTH // 32)
                if weights is not None:
                    weight_at = weights + pair
            for start in tl.static_range(0, WIDTH, TILE):
                column = start + tl.arange(0, TILE)
                value = tl.load(values + column, mask=column < WIDTH)
                tl.store(out + row * WIDTH + column, value, mask=column < WIDTH)
                if x_scale is not None:
                    group = start // 32 + tl.arange(0, TILE // 32)
                    scale = tl.load(scales + group, mask=group < WIDTH // 32)
                    tl.store(out_scale + row * (WIDTH // 32) + group, scale, mask=group < WIDTH // 32)
            if weights is not None:
                tl.store(out_weights + row, tl.load(weight_at))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def ep_dispatch(
    target: Target, comm, x, x_scale, ids, weights, experts, count, out, out_scale, out_weights, offsets, source, inverse
) -> None:
    rows, k, width = *ids.shape, x.shape[1]
    told = f"ep_dispatch({spell(x, rows=False)}, k={k}, experts={experts}, weights={'yes' if weights is not None else 'no'})"
    windows = windows_of(comm, x.device, told)
    scales = _aligned(width * x.element_size())
    after = scales + (_aligned(width // 32) if x_scale is not None else 0)
    record = after + (_aligned(4 * k) if weights is not None else 0)
    tile = min(tile_width(width), target.row_columns)
    row = {"RECORD": record, "SCALES": scales, "WEIGHTS": after, "WIDTH": width, "TILE": tile}
    places, world = windows.places(), windows.ranks
    halves = {name: places[name] for name in ("ROWS_AT", "HALF")}
    own = (windows.bases, windows.rank, windows.state)
    if world > 1:
        launch(
            show_tokens_kernel, (min(rows, COPY_PROGRAMS),), *own, x, x.stride(0), x_scale, weights, count, rows, K=k,
            KS=next_power_of_2(k), **halves, **row, early=True,
        )  # fmt: skip
    launch(
        meet_kernel, (1,), *own, tag(told), nanoseconds(comm), ids, count, rows, out.shape[0], K=k, E=experts, W=world,
        RANKS=next_power_of_2(world), HALF=places["HALF"], RECORD=record, TILE=PAIR_TILE,
        early=True,
    )  # fmt: skip
    settled = windows.meeting(comm, "ep_dispatch", told)
    ranks = next_power_of_2(world)
    each = min(next_power_of_2(max(rows * k, 16)), PAIRS_AT_ONCE // ranks)
    launch(
        sort_kernel, (world * experts + 1,), *own, ids, count, rows, offsets, source, inverse, K=k, E=experts, W=world,
        RANKS=ranks, EACH=each, TILE=PAIR_TILE, warps=min(16, max(4, ranks * each // 256)), early=True,
    )  # fmt: skip
    launch(
        pull_kernel, (min(out.shape[0], COPY_PROGRAMS),), *own, x, x.stride(0), x_scale, weights, offsets, source, out,
        out_scale, out_weights, K=k, E=experts, **places, **row, early=True,
    )  # fmt: skip
    settled()


MAKERS = [offer("ep_dispatch", ep_dispatch)]
