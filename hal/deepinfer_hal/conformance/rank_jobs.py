"""What each rank's process does in the cases of `communication.py`: calls, compared with what plain loops say.

Every rank makes the inputs of all ranks from seeds, so no result has to travel to be compared.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer_hal.card import get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.rank_process import Rank
from deepinfer_hal.conformance.verdict import CheckFailed
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.errors import CommunicatorMismatch, CommunicatorTimeout
from deepinfer_hal.ops import _common as c
from deepinfer_hal.statics import call_spec

TOKENS = (5, 0, 9, 2)
"""Valid rows of each rank: uneven, one without any."""

I32 = torch.int32


def call(rank: Rank, op: str, **args: Any) -> dict[str, Any]:
    """One checked call of the backend's kernel of an op, or its reference; host copies of its arguments afterwards."""
    card = get_card(op)
    bound = card.bind_args((), args)
    check_call(card, bound)
    kernel = Dispatcher(rank.backend, rank.index).bind(op, "", **call_spec(card, bound).statics)
    kernel(*bound.values())
    rank.backend.synchronize(rank.index)
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in bound.items()}


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 over the bytes of tensors."""
    total = hashlib.sha256()
    for one in tensors:
        total.update(one.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(number * 1009**place for place, number in enumerate(numbers, 1)))


def same(what: str, have: torch.Tensor, want: torch.Tensor) -> None:
    """CheckFailed names the first element whose bits differ."""
    differs = bits(have) != bits(want)
    if bool(differs.any()):
        where = tuple(differs.nonzero()[0].tolist())
        raise CheckFailed(f"{what}{list(where)} is {have[where].item()}, must be {want[where].item()}")


def within(what: str, have: torch.Tensor, want: torch.Tensor, op: str, args: dict[str, Any]) -> None:
    """CheckFailed names the worst element outside the card's tolerance."""
    allowed = get_card(op).tolerance(args, "out")
    used = (have.double() - want.double()).abs() / (allowed.atol + allowed.rtol * want.double().abs()).clamp(min=1e-300)
    if have.numel() and not bool((used <= 1).all()):
        worst = int(used.nan_to_num(float("inf")).argmax())
        raise CheckFailed(f"{what} element {worst} is {have.flatten()[worst]}, must be {want.flatten()[worst]}")


# ------------------------------------------------------------------------------------------------- collectives


def all_reduce(rank: Rank) -> dict[str, Any]:
    """Sums and maxima of every dtype; the digest must be equal on all ranks."""
    results = []
    with rank.open() as comm:
        for number, (shape, dtype, operation) in enumerate(
            (((3, 5120), torch.bfloat16, "sum"), ((7, 33), torch.float32, "sum"), ((2, 384), I32, "sum"),
             ((4, 64), torch.float32, "max"), ((0, 64), torch.bfloat16, "sum"))
        ):  # fmt: skip
            gens = [seeded(number, r) for r in range(comm.world_size)]
            if dtype == I32:
                every = torch.stack([torch.randint(-999, 999, shape, generator=gen, dtype=I32) for gen in gens])
            else:
                every = torch.stack([torch.randn(shape, generator=gen).to(dtype) for gen in gens])
            x, out = every[comm.rank].to(rank.device), c.poisoned(*shape, dtype=dtype, device=rank.device)
            runs = [call(rank, "all_reduce", comm=comm, x=x, operation=operation, out=out)["out"].clone() for _ in range(2)]
            same("out of a second run", runs[1], runs[0])
            want = every.double().sum(0) if operation == "sum" else every.double().amax(0)
            args = {"comm": comm, "operation": operation, "out": runs[0], "x": every.reshape(-1, shape[1])}
            within(f"{operation} of {list(shape)}", runs[0], want, "all_reduce", args)
            results.append(runs[0])
    return {"digest": digest(*results)}


def all_gather(rank: Rank) -> dict[str, Any]:
    """Uneven counts and an empty rank; rows past a rank's count stay untouched."""
    results = []
    with rank.open() as comm:
        world, bound = comm.world_size, max(TOKENS)
        kinds = ((64, torch.bfloat16), (33, torch.float32), (528, torch.uint8), (1, torch.int64))
        for number, (width, dtype) in enumerate(kinds):
            gens = [seeded(number, r) for r in range(world)]
            every = [torch.randint(0, 200, (bound, width), generator=gen).to(dtype) for gen in gens]
            out = c.poisoned(world, bound, width, dtype=dtype)
            want = out.clone()
            for r in range(world):
                want[r, : TOKENS[r]] = every[r][: TOKENS[r]]
            got = call(
                rank, "all_gather", comm=comm, x=every[comm.rank].to(rank.device),
                count=c.count_tensor(TOKENS[comm.rank], rank.device), out=out.to(rank.device),
                counts=c.poisoned(world, dtype=I32, device=rank.device),
            )  # fmt: skip
            same("out", got["out"], want)
            same("counts", got["counts"], torch.tensor(TOKENS[:world], dtype=I32))
            results.append(got["out"])
    return {"digest": digest(*results)}


def broadcast(rank: Rank) -> dict[str, Any]:
    """From every rank in turn, also nothing at all."""
    with rank.open() as comm:
        for root in range(comm.world_size):
            for shape in ((3, 64), (1, 33), (0, 8)):
                every = [torch.randn(shape, generator=seeded(root, r)).bfloat16() for r in range(comm.world_size)]
                got = call(rank, "broadcast", comm=comm, root=root, x=every[comm.rank].to(rank.device))
                same(f"x from rank {root}", got["x"], every[root])
    return {}


def barrier(rank: Rank) -> dict[str, Any]:
    """Ranks come one after the other; when each came and left, on the machine's one clock."""
    with rank.open() as comm:
        call(rank, "barrier", comm=comm)
        time.sleep(0.1 * comm.rank)
        came = time.monotonic()
        call(rank, "barrier", comm=comm)
        return {"came": came, "left": time.monotonic()}


# --------------------------------------------------------------------------------------------- expert parallelism


def expert_ids(kind: str, tokens: Sequence[int], experts: int, k: int, seed: int) -> list[torch.Tensor]:
    """i32 [tokens, k] for each rank: "random", "holes" (a third is -1), "one" (all choose the last expert)."""
    found = []
    for r, count in enumerate(tokens):
        gen = seeded(seed, r)
        picks = [torch.randperm(experts, generator=gen)[:k] for _ in range(count)]
        ids = (torch.stack(picks) if picks else torch.zeros(0, k)).to(I32)
        if kind == "holes":
            ids[torch.rand(ids.shape, generator=gen) < 0.3] = -1
        found.append(torch.full_like(ids, experts - 1) if kind == "one" else ids)
    return found


def dispatch_and_combine(rank: Rank) -> dict[str, Any]:
    """The way out and back for every kind of load: uneven, empty ranks, one expert, no tokens at all, dense and codes."""
    results = []
    with rank.open() as comm:
        tokens = TOKENS[: comm.world_size]
        for number, (kind, loads, coded) in enumerate(
            (("random", tokens, True), ("random", tokens, False), ("holes", tokens, True), ("one", tokens, False),
             ("random", (0,) * comm.world_size, True), ("random", (0,) * (comm.world_size - 1) + (3,), False))
        ):  # fmt: skip
            results.append(_round_trip(rank, comm, number, kind, loads, coded))
    return {"digest": digest(*results)}


def _round_trip(rank: Rank, comm: Communicator, number: int, kind: str, loads: Sequence[int], coded: bool) -> torch.Tensor:
    world, me, k, width = comm.world_size, comm.rank, 3, 64
    experts, bound, spare = 8 // world, max(loads), 2
    ids = expert_ids(kind, loads, 8, k, number)
    xs = [torch.randn(n, width, generator=seeded(number, 7, r)).bfloat16() for r, n in enumerate(loads)]
    weights = [torch.rand(n, k, generator=seeded(number, 8, r)) for r, n in enumerate(loads)]
    pairs = [c.quantised(x) if coded else (x, None) for x in xs]
    room = world * bound * k + spare

    def padded(x: torch.Tensor | None) -> torch.Tensor | None:
        """One row more than are valid, for the count to cut off."""
        return None if x is None else torch.cat((x, x.new_full((1, *x.shape[1:]), 1))).to(rank.device)

    y, y_scale = c.poisoned_pair(room, width, rank.device)
    if not coded:
        y, y_scale = c.poisoned(room, width, dtype=torch.bfloat16, device=rank.device), None
    got = call(
        rank, "ep_dispatch", comm=comm, x=padded(pairs[me][0]), x_scale=padded(pairs[me][1]), ids=padded(ids[me]),
        weights=padded(weights[me]), experts=experts, count=c.count_tensor(loads[me], rank.device), out=y, out_scale=y_scale,
        out_weights=c.poisoned(room, dtype=torch.float32, device=rank.device),
        offsets=c.poisoned(experts + 1, dtype=I32, device=rank.device),
        source=c.poisoned(room, 2, dtype=I32, device=rank.device),
        inverse=c.poisoned(loads[me] + 1, k, 2, dtype=I32, device=rank.device),
    )  # fmt: skip
    _check_dispatch(got, ids, pairs, weights, experts, me)
    return _combine(rank, comm, got, ids[me], xs[me], weights[me])


def _check_dispatch(
    got: dict[str, Any], ids: list[torch.Tensor], pairs: list[tuple], weights: list[torch.Tensor], experts: int, me: int
) -> None:
    """Against loops over experts, ranks, tokens and choices, in this order."""
    rows, offsets, landed = {}, {}, torch.full((*ids[me].shape, 2), -1, dtype=I32)
    for owner in range(len(ids)):
        rows[owner], offsets[owner] = [], [0]
        for expert in range(owner * experts, (owner + 1) * experts):
            for r, chosen in enumerate(ids):
                for t, j in (chosen == expert).nonzero().tolist():
                    if r == me:
                        landed[t, j] = torch.tensor((owner, len(rows[owner])), dtype=I32)
                    rows[owner].append((r, t, j))
            offsets[owner].append(len(rows[owner]))
    mine, k = rows[me], ids[me].shape[1]
    same("offsets", got["offsets"], torch.tensor(offsets[me], dtype=I32))
    same("inverse", got["inverse"][:-1], landed)
    untouched = {"inverse": got["inverse"][-1:]}
    source = torch.tensor([(r, t * k + j) for r, t, j in mine], dtype=I32).view(-1, 2)
    want = {"source": source, "out_weights": torch.tensor([weights[r][t, j] for r, t, j in mine])}
    for name, part in (("out", 0), ("out_scale", 1)):
        if got[name] is not None:
            want[name] = torch.stack([pairs[r][part][t] for r, t, _ in mine]) if mine else got[name][:0]
    for name, value in want.items():
        same(name, got[name][: len(mine)], value)
        untouched[name] = got[name][len(mine) :]
    for name, value in untouched.items():
        same(f"{name} past the rows that count", value, c.poisoned(*value.shape, dtype=value.dtype))


def _combine(
    rank: Rank, comm: Communicator, sent: dict[str, Any], ids: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Experts that multiply by a power of two, so that what comes back is known; the sum is compared with float64."""
    experts, width = sent["offsets"].numel() - 1, x.shape[1]
    total, first = int(sent["offsets"][-1]), comm.rank * experts
    of_row = torch.repeat_interleave(torch.arange(experts), sent["offsets"].diff().long()) + first
    dense = c.load_rows(sent["out"], sent["out_scale"], total)
    rows = torch.full((sent["out"].shape[0], width), float("nan"), dtype=torch.bfloat16)
    rows[:total] = (dense * 2.0 ** (of_row % 3)[:, None]).bfloat16()
    shared = torch.cat((x * 3, x.new_zeros(1, width)))

    def combine(weighed: bool, rows: torch.Tensor = rows, shared: torch.Tensor = shared) -> torch.Tensor:
        device = rank.device
        out = c.poisoned(ids.shape[0] + 1, width, dtype=rows.dtype, device=device)
        given = torch.cat((weights, weights.new_zeros(1, ids.shape[1]))).to(device) if weighed else None
        return call(
            rank, "ep_combine", comm=comm, rows=rows.to(device), received=sent["offsets"][-1:].to(device),
            source=sent["source"].to(device), inverse=sent["inverse"].to(device), weights=given, shared=shared.to(device),
            count=c.count_tensor(ids.shape[0], device), out=out,
        )["out"]  # fmt: skip

    once, again, plain = combine(True), combine(True), combine(False)
    same("out of a second run", again, once)
    own = c.load_rows(*c.quantised(x)) if sent["out_scale"] is not None else x.float()
    _check_order(combine, rows, shared.float() / 7, (dense * 2.0 ** (of_row % 3)[:, None]) / 3, own, ids)
    factor = torch.where(ids >= 0, 2.0 ** (ids % 3), 0.0).double()
    for name, have, weight in (("weighed", once, weights.double()), ("plain", plain, torch.ones_like(weights).double())):
        want = (own.double()[:, None] * (factor * weight)[..., None]).sum(1) + shared[:-1].double()
        terms = torch.cat((rows[:total].reshape(-1, width), own.bfloat16() * 4, shared[:-1]))
        within(f"{name} sum", have[:-1], want, "ep_combine", {"out": have, "inverse": sent["inverse"], "rows": terms})
        same(f"{name} out past the count", have[-1:], c.poisoned(1, width, dtype=torch.bfloat16))
    return torch.cat((once[:-1], plain[:-1]))


def _check_order(
    combine: Callable[..., torch.Tensor], rows: torch.Tensor, shared: torch.Tensor, values: torch.Tensor, own: torch.Tensor,
    ids: torch.Tensor,
) -> None:  # fmt: skip
    """Sums of FP32 rows, of which every bit shows the order: choices from the first on, then shared."""
    wide = rows.float()
    wide[: values.shape[0]] = values
    want = torch.zeros_like(own)
    for choice in ids.unbind(1):
        want = torch.where((choice >= 0)[:, None], want + own * 2.0 ** (choice % 3)[:, None] / 3, want)
    same("sum in the order of choices", combine(False, wide, shared)[:-1], want + shared[:-1])


# --------------------------------------------------------------------------------------------- late, dead, confused


def late(rank: Rank, who: int) -> dict[str, Any]:
    """One rank comes after half the deadline: nothing happens to anyone."""
    with rank.open() as comm:
        if comm.rank == who:
            time.sleep(comm.deadline_s / 2)
        call(rank, "barrier", comm=comm)
        x = torch.ones(1, 4, device=rank.device)
        total = call(rank, "all_reduce", comm=comm, x=x, operation="sum", out=torch.zeros_like(x))["out"]
        same("sum after the late rank", total, torch.full((1, 4), float(comm.world_size)))
    return {}


def dead(rank: Rank, who: int, when: str) -> dict[str, Any]:
    """One rank is killed before a call, or in it after all have met. The others: whom the error names, after how long."""
    comm = rank.open()
    call(rank, "barrier", comm=comm)
    x = torch.ones(4, 1024, device=rank.device)
    if comm.rank == who:
        if when == "transfer":
            comm.exchange("all_reduce(sum, f32[4, 1024])", ())
        rank.die()
    started = time.monotonic()
    try:
        call(rank, "all_reduce", comm=comm, x=x, operation="sum", out=torch.zeros_like(x))
    except CommunicatorTimeout as error:
        return {"named": list(error.ranks), "waited": time.monotonic() - started, "message": str(error)}
    finally:
        comm.close()
    raise CheckFailed(f"all_reduce finished although rank {who} is dead")


def confused(rank: Rank, who: int) -> dict[str, Any]:
    """One rank makes another call: every rank is told which, nothing moves, and the next call is an ordinary one."""
    with rank.open() as comm:
        x = torch.ones(2, 3 if comm.rank == who else 4, device=rank.device)
        out = torch.zeros_like(x)
        try:
            call(rank, "all_reduce", comm=comm, x=x, operation="sum", out=out)
        except CommunicatorMismatch as error:
            named = list(error.ranks)
        else:
            raise CheckFailed("ranks reduced tensors of different shapes")
        same("out", out.cpu(), torch.zeros(x.shape))
        call(rank, "barrier", comm=comm)
    return {"named": named}
