"""The device half of `windows.py`: where things lie in a window, and how ranks meet in a kernel."""

from __future__ import annotations

import time

import triton
import triton.language as tl

from deepinfer_triton.numeric import INTERPRETING
from deepinfer_triton.ranks import windows

HEADER_BYTES = tl.constexpr(4 * windows.HEADER_WORDS)
HEADERS_AT = tl.constexpr(windows.HEADERS_AT)
HALF_HEADERS = tl.constexpr(4 * windows.HEADER_WORDS * windows.MOST_RANKS)
IDS_AT = tl.constexpr(windows.IDS_AT)
IDS_ROOM = tl.constexpr(windows.IDS_ROOM)
OK = tl.constexpr(windows.OK)
MISSING = tl.constexpr(windows.MISSING)
MISMATCH = tl.constexpr(windows.MISMATCH)
NO_ROOM = tl.constexpr(windows.NO_ROOM)
NO_WINDOW_ROOM = tl.constexpr(windows.NO_WINDOW_ROOM)
NOT_BACK = tl.constexpr(windows.NOT_BACK)


@triton.jit
def words_at(address):
    """A byte address, or several, as pointers to int32."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def values_at(address, dtype: tl.constexpr):
    """A byte address that is a multiple of 16 as a pointer to `dtype`."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def half_of(bases, rank, call, ROWS_AT: tl.constexpr, HALF: tl.constexpr):
    """Address of the rows of `rank` (or of several) for call number `call`, a multiple of 16."""
    return tl.load(bases + rank) + ROWS_AT + (call & 1).to(tl.int64) * HALF


@triton.jit
def header_of(bases, me, call, rank):
    """Address of what `rank` (or several) told `me` in the header of call number `call`."""
    return tl.load(bases + me) + HEADERS_AT + (call & 1).to(tl.int64) * HALF_HEADERS + rank * HEADER_BYTES


@triton.jit
def ids_from(ids, bases, me, call, rank, W: tl.constexpr):
    """The ids that `rank` sent to `me`: its own argument where there is one rank."""
    if W == 1:
        return ids
    else:
        return words_at(tl.load(bases + me) + IDS_AT + ((call & 1).to(tl.int64) * W + rank) * (4 * IDS_ROOM))


@triton.jit
def pairs_from(pairs, bases, me, call, rank, W: tl.constexpr):
    """How many ids those are."""
    if W == 1:
        return pairs
    else:
        return tl.load(words_at(header_of(bases, me, call, rank)) + 1, volatile=True)


def _host_clock() -> int:
    return time.monotonic_ns()


_host_clock.__triton_builtin__ = True  # the interpreter calls it as it is, and the compiler never reaches it


@triton.jit
def clock():
    """Nanoseconds. Each thread reads its own time, and threads must agree, or they would not leave a loop together: the latest
    of all counts. With four warps, each lane below is a thread."""
    if INTERPRETING:
        return _host_clock()
    else:
        lanes = tl.arange(0, 128)
        read: tl.constexpr = "mov.u64 $0, %globaltimer; // $1"
        return tl.max(tl.inline_asm_elementwise(read, "=l,r", [lanes], dtype=tl.int64, is_pure=False, pack=1), axis=0)


@triton.jit
def set_status(state, code, a, b, c, d):
    tl.store(state + 2, code)
    tl.store(state + 3, a)
    tl.store(state + 4, b)
    tl.store(state + 5, c)
    tl.store(state + 6, d)


@triton.jit
def come_together(bases, me, state, tag, first, second, deadline, W: tl.constexpr, RANKS: tl.constexpr):
    """Tells all ranks (tag, first, second), and that what this rank wrote for the call may be read; returns 1 if all have told
    the same tag before the deadline, else sets the status. One program alone calls it. RANKS: a power of two >= W."""
    call = tl.load(state) + 1
    every = tl.arange(0, RANKS)
    there = every < W
    to = tl.load(bases + every, mask=there, other=0) + HEADERS_AT + (call & 1).to(tl.int64) * HALF_HEADERS
    header = words_at(to + me * HEADER_BYTES)
    tl.store(header, tl.zeros([RANKS], tl.int32) + tag, mask=there)
    tl.store(header + 1, tl.zeros([RANKS], tl.int32) + first, mask=there)
    tl.store(header + 2, tl.zeros([RANKS], tl.int32) + second, mask=there)
    tl.debug_barrier()  # all threads' stores come before the flags
    for rank in range(W):
        tl.atomic_xchg(words_at(tl.load(bases + rank)) + me, call, sem="release", scope="sys")
    low, high = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    start = clock()
    flags = words_at(tl.load(bases + me))
    for rank in range(W):
        seen = tl.atomic_add(flags + rank, 0, sem="acquire", scope="sys")
        while (seen - call < 0) & (clock() - start < deadline):
            seen = tl.atomic_add(flags + rank, 0, sem="acquire", scope="sys")
        bit = (seen - call < 0).to(tl.int32) << (rank & 31)
        low |= tl.where(rank < 32, bit, 0)
        high |= tl.where(rank < 32, 0, bit)
    tl.debug_barrier()
    tl.store(state, call)
    missed = low | high
    told = tl.load(words_at(header_of(bases, me, call, every)), mask=there, other=0, volatile=True)
    differ = tl.sum((there & (told != tag)).to(tl.int32), axis=0)
    if missed != 0:
        tl.store(state + 1, 1)
        set_status(state, MISSING, low, high, 0, 0)
    elif differ != 0:
        set_status(state, MISMATCH, 0, 0, 0, 0)
    return ((missed == 0) & (differ == 0)).to(tl.int32)
