"""barrier: no rank returns before every rank has called."""

from __future__ import annotations

from typing import Any

from deepinfer_hal.card import COMM, Case, OpCard, register
from deepinfer_hal.communicator import Communicator, SingleRank
from deepinfer_hal.ops import _common as c


def barrier(comm: Communicator) -> None:
    """Returns when every rank has called; CommunicatorTimeout names ranks that did not within the deadline."""
    comm.exchange("barrier()", ())


def _cases() -> list[Case]:
    return [Case("barrier")]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    return {"comm": SingleRank()}


CARD = register(
    OpCard(
        name="barrier",
        group="communication",
        summary="No rank returns before every rank has called.",
        signature=(COMM,),
        reference=barrier,
        empty="one rank: returns at once",
        invariance="nothing is computed",
        enumerate_cases=_cases,
        generate=_generate,
    )
)
