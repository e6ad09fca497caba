"""What each rank does in test_ranks.py: threads of one process, each a modelled chip."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from deepinfer_ascend import twin
from deepinfer_hal.card import get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.conformance.rank_jobs import I32, expert_ids, same, seeded
from deepinfer_hal.conformance.rank_process import Rank
from deepinfer_hal.errors import CommunicatorError
from deepinfer_hal.ops import _common as c

EXPERTS, CHOICES, WIDTH, SPARE = 8, 3, 96, 3


def _both(op: str, comm: Communicator, args: dict[str, Any], outputs: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """An op by its kernel and by its reference over the same communicator, on equal bytes; every output must be equal."""
    card, results = get_card(op), []
    for call in (twin.bind(card), card.reference):
        made = {name: None if value is None else value.clone() for name, value in outputs.items()}
        bound = card.bind_args((), {"comm": comm, **args, **made})
        check_call(card, bound)
        call(*bound.values())
        results.append(made)
    for name, value in results[0].items():
        if value is not None:
            same(f"{op}'s {name}", value, results[1][name])
    return results[0]


def against_reference(rank: Rank, loads: Sequence[int], kind: str, coded: bool, weighed: bool, seed: int) -> int:
    """Dispatch and combine, bit for bit what the references make of them; the rows that this rank received."""
    with rank.open() as comm:
        n, me, experts = loads[rank.world.rank], rank.world.rank, EXPERTS // rank.world.size
        ids = expert_ids(kind, loads, EXPERTS, CHOICES, seed)[me]
        x, x_scale = torch.randn(n, WIDTH, generator=seeded(seed, 1, me)).bfloat16(), None
        room = rank.world.size * max(loads) * CHOICES + SPARE
        out, out_scale = c.poisoned(room, WIDTH, dtype=x.dtype), None
        if coded:
            x, x_scale = c.quantised(x)
            out, out_scale = c.poisoned_pair(room, WIDTH, "cpu")
        weights = torch.rand(n, CHOICES, generator=seeded(seed, 2, me)) if weighed else None
        sent = _both(
            "ep_dispatch", comm, dict(x=x, x_scale=x_scale, ids=ids, weights=weights, experts=experts, count=None),
            {
                "out": out, "out_scale": out_scale, "out_weights": c.poisoned(room, dtype=torch.float32) if weighed else None,
                "offsets": c.poisoned(experts + 1, dtype=I32), "source": c.poisoned(room, 2, dtype=I32),
                "inverse": c.poisoned(n, CHOICES, 2, dtype=I32),
            },
        )  # fmt: skip
        dtype = torch.bfloat16 if coded else torch.float32
        rows = torch.randn(room, WIDTH, generator=seeded(seed, 3, me)).to(dtype)
        shared = torch.randn(n, WIDTH, generator=seeded(seed, 4, me)).to(dtype) if weighed else None
        count = c.count_tensor(max(n - 1, 0), "cpu")
        given = dict(rows=rows, received=sent["offsets"][-1:], source=sent["source"], inverse=sent["inverse"], shared=shared)
        for limit in (None, count):
            _both("ep_combine", comm, {**given, "weights": weights, "count": limit}, {"out": c.poisoned(n, WIDTH, dtype=dtype)})
        return int(sent["offsets"][-1])


def _dispatch(comm: Communicator) -> None:
    x, ids = torch.ones(2, 32), torch.zeros(2, 1, dtype=I32)
    room = 2 * comm.world_size
    twin.bind(get_card("ep_dispatch"))(
        comm, x, None, ids, None, 2, None, torch.zeros(room, 32), None, None, torch.zeros(3, dtype=I32),
        torch.zeros(room, 2, dtype=I32), torch.zeros(2, 1, 2, dtype=I32),
    )  # fmt: skip


def missing(rank: Rank, who: int, how: str) -> list[dict[str, Any]]:
    """One rank dies before a kernel that all others call, or comes to it after their deadline. What two calls tell."""
    comm, told = rank.open(), []
    _dispatch(comm)
    if rank.world.rank == who and how == "dies":
        rank.die()
    if rank.world.rank == who:
        time.sleep(1.5 * comm.deadline_s)
    for _ in range(2):
        started = time.monotonic()
        try:
            _dispatch(comm)
        except CommunicatorError as error:
            told.append({"error": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "message": str(error)})
            told[-1]["waited"] = time.monotonic() - started
    return told


def in_turn(rank: Rank) -> float:
    """A rank that comes late, but within the deadline, is no error."""
    with rank.open() as comm:
        time.sleep(0.2 * rank.world.rank)
        _dispatch(comm)
        return comm.deadline_s
