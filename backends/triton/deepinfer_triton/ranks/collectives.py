"""all_reduce, all_gather, broadcast, barrier: ranks meet on the host, the communicator moves bytes, kernels do the rest.

A vendor's sum has an order of its own, which changes with the number of ranks and the size; so values of all ranks are
gathered and summed here, in the order of ranks. One rank reads its own argument, and nothing is moved.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops._communication import spell
from deepinfer_hal.ops.all_reduce import OPERATIONS

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.ranks.offer import offer
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.targets import Target


@triton.jit
def reduce_kernel(
    every, rank_stride, row_stride, out, W: tl.constexpr, N: tl.constexpr, SUM: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """every [W, T, N] -> out [T, N], in the order of ranks."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < N
    at = every + row * row_stride + column
    total = tl.load(at, mask=inside, other=0)
    if WIDE:
        total = total.to(tl.float32)
    for _rank in range(1, W):
        at += rank_stride
        value = tl.load(at, mask=inside, other=0)
        if WIDE:
            value = value.to(tl.float32)
        if SUM:
            total += value
        else:
            total = tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)
    if WIDE:
        total = narrow(total, out.dtype.element_ty)
    tl.store(out + row * N + column, total, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    x, rank_stride, row_stride, counts, rows, out, out_stride, told, N: tl.constexpr, TILE: tl.constexpr
):
    """x [ranks, rows, N] -> out [ranks, rows, N], of each rank the rows that its count says; told: those counts."""
    rank, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = rows
    if counts is not None:
        n = valid_rows(counts + rank, rows)
    if told is not None:
        if (row == 0) & (tl.program_id(2) == 0):
            tl.store(told + rank, n)
    if row < n:
        column = tl.program_id(2) * TILE + tl.arange(0, TILE)
        value = tl.load(x + rank * rank_stride + row * row_stride + column, mask=column < N)
        tl.store(out + (rank * rows + row) * out_stride + column, value, mask=column < N)


def _tile(target: Target, width: int) -> int:
    return min(target.columns, next_power_of_2(width))


def _copy_rows(target: Target, x: torch.Tensor, out: torch.Tensor, ranks: int = 1, counts=None, told=None) -> None:
    """x [ranks * T, N], of each rank as many rows as counts says, to the same rows of out, whose rows may be strided."""
    rows, width = x.shape[0] // ranks, x.shape[1]
    tile = _tile(target, width)
    launch(
        rows_kernel, (ranks, max(rows, 1), cdiv(width, tile)), x, rows * x.stride(0), x.stride(0), counts, rows, out,
        out.stride(0), told, N=width, TILE=tile,
    )  # fmt: skip


def _packed(target: Target, x: torch.Tensor) -> torch.Tensor:
    """x [T, N] without gaps: what a communicator moves."""
    if x.is_contiguous():
        return x
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _copy_rows(target, x, made)
    return made


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _gathered(comm, x: torch.Tensor) -> torch.Tensor:
    """x of every rank, [world, *x.shape]."""
    every = torch.empty(comm.world_size, *x.shape, dtype=x.dtype, device=x.device)
    comm.all_gather(_bytes(x), _bytes(every).view(comm.world_size, -1))
    return every


def all_reduce(target: Target, comm, x, operation, out) -> None:
    if operation not in OPERATIONS:
        raise BadCall(f"all_reduce: operation is {operation!r}; it must be {' or '.join(OPERATIONS)}")
    comm.exchange(f"all_reduce({operation}, {spell(x)})", ())
    rows, width = x.shape
    every = x[None] if comm.world_size == 1 else _gathered(comm, _packed(target, x))
    tile = _tile(target, width)
    launch(
        reduce_kernel, (rows, cdiv(width, tile)), every, every.stride(0), every.stride(1), out, W=comm.world_size,
        N=width, SUM=operation == "sum", WIDE=x.is_floating_point(), TILE=tile,
    )  # fmt: skip


def all_gather(target: Target, comm, x, count, out, counts) -> None:
    comm.exchange(f"all_gather({spell(x)})", ())
    world, (rows, width) = comm.world_size, x.shape
    if world == 1:
        _copy_rows(target, x, out[0], 1, count, counts)
        return
    mine = torch.full((1,), rows, dtype=torch.int32, device=x.device) if count is None else count
    every = _gathered(comm, _packed(target, x)).view(world * rows, width)
    _copy_rows(target, every, out.view(world * rows, width), world, _gathered(comm, mine).view(-1), counts)


def broadcast(target: Target, comm, root, x) -> None:
    comm.exchange(f"broadcast(from {root}, {spell(x)})", ())
    if comm.world_size == 1:
        return
    sent = _packed(target, x)
    comm.broadcast(_bytes(sent), root)
    if comm.rank != root and sent is not x:
        _copy_rows(target, sent, x)


def barrier(target: Target, comm) -> None:
    comm.exchange("barrier()", ())


MAKERS = [offer(call.__name__, call) for call in (all_reduce, all_gather, broadcast, barrier)]
