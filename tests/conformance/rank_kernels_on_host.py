"""The CUDA backend's rank kernels in Triton's interpreter: ranks are processes, their windows files; jobs for the tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance.rank_jobs import I32, call, digest, expert_ids, same, seeded
from deepinfer_hal.conformance.rank_process import Rank
from deepinfer_hal.errors import BadCall, CommunicatorError, Unsupported
from deepinfer_hal.kernel import Kernel
from deepinfer_triton.ranks import rank_kernels
from deepinfer_triton.targets import INTERPRETER

from tests.unit.cuda_on_host import CudaOnHost


class RanksOnHost(CudaOnHost):
    """The stand-in's GPU with the rank kernels alone."""

    def kernels(self, index: int) -> Sequence[Kernel]:
        return rank_kernels(INTERPRETER)


def _told(call_it: Any) -> dict[str, Any]:
    started = time.monotonic()
    try:
        call_it()
    except (CommunicatorError, BadCall, Unsupported) as error:
        told = {"error": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "message": str(error)}
    else:
        told = {"error": "", "ranks": [], "message": ""}
    return {**told, "waited": time.monotonic() - started}


def _dispatch(rank: Rank, comm: Any, ids: torch.Tensor, room: int, width: int = 32) -> dict[str, Any]:
    """A dispatch of FP32 rows whose first value is their rank and token; four experts a rank."""
    tokens, k = ids.shape
    new = {"offsets": (5,), "source": (room, 2), "inverse": (tokens, k, 2)}
    outputs = {name: torch.full(shape, -9, dtype=I32, device=rank.device) for name, shape in new.items()}
    x = torch.arange(tokens * width, dtype=torch.float32).view(tokens, width) + 1000 * comm.rank
    outputs["out"] = torch.full((room, width), -9.0, device=rank.device)
    try:
        return call(rank, "ep_dispatch", comm=comm, x=x.to(rank.device), ids=ids.to(rank.device), experts=4, **outputs)
    except (BadCall, Unsupported):
        assert all(bool((value == -9).all()) for value in outputs.values()), "a refused dispatch wrote something"
        raise


def _combine(rank: Rank, comm: Any, got: dict[str, Any], **changes: Any) -> torch.Tensor:
    tokens = got["inverse"].shape[0]
    out = torch.full((tokens, got["out"].shape[1]), -9.0, device=rank.device)
    args = dict(rows=got["out"], received=got["offsets"][-1:], source=got["source"], inverse=got["inverse"])
    args = {name: value.to(rank.device) for name, value in {**args, **changes}.items()}
    try:
        return call(rank, "ep_combine", comm=comm, out=out, **args)["out"]
    except (BadCall, Unsupported):
        assert bool((out == -9).all()), "a refused combine wrote something"
        raise


def many(rank: Rank, rounds: int) -> dict[str, Any]:
    """Round after round through both halves of the windows, ranks late in turn; every sum is what plain torch says."""
    sums = []
    with rank.open() as comm:
        for number in range(rounds):
            ids = expert_ids("holes" if number % 2 else "random", (7,) * comm.world_size, 4 * comm.world_size, 2, number)
            if number % comm.world_size == comm.rank:
                time.sleep(0.05)
            got = _dispatch(rank, comm, ids[comm.rank], comm.world_size * 14)
            out = _combine(rank, comm, got)
            x = torch.arange(7 * 32, dtype=torch.float32).view(7, 32) + 1000 * comm.rank
            same(f"round {number}", out, x * (ids[comm.rank] >= 0).sum(1, keepdim=True))
            sums.append(out)
    return {"digest": digest(*sums)}


def refused(rank: Rank) -> list[dict[str, Any]]:
    """Calls that no rank can be served in, each followed by one that is served."""
    with rank.open() as comm:
        last = comm.world_size - 1
        ids = torch.full((3, 2), comm.world_size * 4 - 1, dtype=I32)
        enough = comm.world_size * 6
        small = enough - 1 if comm.rank == last else enough
        wide = 1 << 16
        return [
            _told(lambda: _dispatch(rank, comm, ids, small)),
            _told(lambda: _dispatch(rank, comm, ids, enough)),
            _told(lambda: _dispatch(rank, comm, ids.repeat(4 if comm.rank == last else 1, 1), 5 * enough, wide)),
            _told(lambda: _dispatch(rank, comm, ids[:, :1].contiguous() if comm.rank == last else ids, enough)),
            _told(lambda: _dispatch(rank, comm, ids, enough)),
        ]


def lost(rank: Rank) -> list[dict[str, Any]]:
    """The last rank returns one row too few; then all; then a source that names another pair."""
    with rank.open() as comm:
        last = comm.world_size - 1
        ids = torch.full((2, 1), comm.world_size * 4 - 1, dtype=I32)
        got = _dispatch(rank, comm, ids, comm.world_size * 2)
        fewer = got["offsets"][-1:] - int(comm.rank == last)
        astray = got["source"].clone()
        astray[:, 1] += 1
        return [
            _told(lambda: _combine(rank, comm, got, received=fewer)),
            _told(lambda: _combine(rank, comm, got)),
            _told(lambda: _combine(rank, comm, got, source=astray)),
        ]


def gone(rank: Rank, who: int, when: str) -> list[dict[str, Any]] | None:
    """One rank dies, or stays away for longer than the deadline; what the others are told, and what they are told next."""
    comm = rank.open()
    ids = torch.zeros(2, 1, dtype=I32)
    _dispatch(rank, comm, ids, comm.world_size * 2)
    if comm.rank == who:
        if when == "dead":
            rank.die()
        time.sleep(2 * comm.deadline_s)
    told = [_told(lambda: _dispatch(rank, comm, ids, comm.world_size * 2)) for _ in range(2)]
    comm.close()
    return told


def weighed(rank: Rank) -> dict[str, Any]:
    """Weights at the combine: each product is rounded before it is added, as the card says."""
    with rank.open() as comm:
        ids = expert_ids("random", (5,) * comm.world_size, 4 * comm.world_size, 3, 11)[comm.rank]
        got = _dispatch(rank, comm, ids, comm.world_size * 15)
        weights = torch.rand(5, 3, generator=seeded(12, comm.rank))
        out = _combine(rank, comm, got, weights=weights)
        x = torch.arange(5 * 32, dtype=torch.float32).view(5, 32) + 1000 * comm.rank
        want = torch.zeros(5, 32)
        for j in range(3):
            want = want + x * weights[:, j, None]
        same("weighed", out, want)
        assert get_card("ep_combine").rounding.startswith("each product")
    return {"digest": digest(out)}
