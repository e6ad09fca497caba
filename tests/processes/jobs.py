"""What ranks do in test_communicator.py, beside the jobs of the conformance suite; and backends that move tokens wrongly."""

from __future__ import annotations

import time
from typing import Any

import torch
from deepinfer_cpu.backend import CpuBackend
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance.rank_jobs import I32, call
from deepinfer_hal.conformance.rank_process import Rank
from deepinfer_hal.errors import BadCall, CommunicatorError
from deepinfer_hal.kernel import Kernel


def _told(call_it: Any) -> dict[str, Any]:
    """The error of a call, whom it names and how long it took."""
    started = time.monotonic()
    try:
        call_it()
    except (CommunicatorError, BadCall) as error:
        kind, ranks = type(error).__name__, list(getattr(error, "ranks", ()))
        return {"error": kind, "ranks": ranks, "message": str(error), "waited": time.monotonic() - started}
    return {"error": "", "ranks": [], "message": "", "waited": time.monotonic() - started}


def stuck(rank: Rank, who: int) -> list[dict[str, Any]]:
    """One rank lives but does not come within the deadline; then it comes. The second answer: any later call."""
    with rank.open() as comm:
        if comm.rank == who:
            time.sleep(1.5 * comm.deadline_s)
        return [_told(lambda: call(rank, "barrier", comm=comm)) for _ in range(2)]


def absent(rank: Rank, who: int) -> dict[str, Any] | None:
    """One rank never opens the world."""
    return None if rank.world.rank == who else _told(rank.open)


def leaves(rank: Rank, who: int) -> dict[str, Any] | None:
    """One rank closes while the others go on."""
    with rank.open() as comm:
        call(rank, "barrier", comm=comm)
        return None if comm.rank == who else _told(lambda: call(rank, "barrier", comm=comm))


def _dispatch(rank: Rank, comm: Any, ids: torch.Tensor, room: int) -> dict[str, Any]:
    tokens, k = ids.shape
    new = {"offsets": (5,), "source": (room, 2), "inverse": (tokens, k, 2)}
    outputs = {name: torch.full(shape, -9, dtype=I32) for name, shape in new.items()}
    x = torch.arange(tokens * 32, dtype=torch.float32).view(tokens, 32)
    outputs["out"] = torch.full((room, 32), -9.0)
    try:
        return call(rank, "ep_dispatch", comm=comm, x=x, ids=ids, experts=4, **outputs)
    except BadCall:
        assert all(bool((value == -9).all()) for value in outputs.values()), "a refused dispatch wrote something"
        raise


def no_room(rank: Rank) -> list[dict[str, Any]]:
    """The last rank's bound is too small for one dispatch, and enough for the next."""
    with rank.open() as comm:
        ids = torch.full((3, 2), comm.world_size * 4 - 1, dtype=I32)
        everything = comm.world_size * 6
        small = everything - 1 if comm.rank == comm.world_size - 1 else everything
        return [_told(lambda room=room: _dispatch(rank, comm, ids, room)) for room in (small, everything)]


def lost_row(rank: Rank) -> dict[str, Any]:
    """The last rank returns one row too few."""
    with rank.open() as comm:
        ids = torch.full((2, 1), comm.world_size * 4 - 1, dtype=I32)
        got = _dispatch(rank, comm, ids, comm.world_size * 2)
        received = got["offsets"][-1:] - (1 if comm.rank == comm.world_size - 1 else 0)
        out = torch.zeros(2, 32)
        combine = dict(rows=got["out"], received=received, source=got["source"], inverse=got["inverse"], out=out)
        return _told(lambda: call(rank, "ep_combine", comm=comm, **combine))


# ------------------------------------------------------------------------------------------------- broken backends


def _kernel(op: str, spoil: Any) -> Kernel:
    """The reference of an op, and then `spoil(args)`; the ranks still meet, so nothing hangs."""
    card = get_card(op)

    def fn(*values: Any) -> None:
        card.reference(*values)
        spoil(card.bind_args(values, {}))

    return Kernel(op, "broken", fn, f"reference::{op}+broken", "yes", priority=500)


class _Broken(CpuBackend):
    _op = ""

    def kernels(self, index: int) -> list[Kernel]:
        return [*super().kernels(index), _kernel(self._op, self._spoil)]

    def _spoil(self, args: dict[str, Any]) -> None:
        raise NotImplementedError


class LosesAToken(_Broken):
    name, _op = "loses", "ep_dispatch"

    def _spoil(self, args: dict[str, Any]) -> None:
        if int(args["offsets"][-1]):
            args["offsets"][1:] -= (args["offsets"][1:] == args["offsets"][-1]).to(I32)


class MixesUpSources(_Broken):
    """Rows of an expert lie in reverse: every token is there, but sums change their order."""

    name, _op = "mixes", "ep_dispatch"

    def _spoil(self, args: dict[str, Any]) -> None:
        bounds = args["offsets"].tolist()
        for start, stop in zip(bounds, bounds[1:], strict=False):
            for name in ("out", "out_scale", "source"):
                if args[name] is not None:
                    args[name][start:stop] = args[name][start:stop].flip(0)


class WritesPastTheRows(_Broken):
    name, _op = "past", "ep_dispatch"

    def _spoil(self, args: dict[str, Any]) -> None:
        args["out"][-1] = 0


class ForgetsARank(_Broken):
    name, _op = "forgets", "all_gather"

    def _spoil(self, args: dict[str, Any]) -> None:
        args["out"][-1, :1] = args["out"][0, :1]


class AddsTwice(_Broken):
    name, _op = "twice", "ep_combine"

    def _spoil(self, args: dict[str, Any]) -> None:
        if args["shared"] is not None:
            n = int(args["count"][0]) if args["count"] is not None else args["out"].shape[0]
            args["out"][:n] += args["shared"][:n]


class SumsOnOneRank(_Broken):
    """The other ranks keep their own values."""

    name, _op = "one", "all_reduce"

    def _spoil(self, args: dict[str, Any]) -> None:
        if args["comm"].rank and args["out"].numel():
            args["out"].copy_(args["x"])
