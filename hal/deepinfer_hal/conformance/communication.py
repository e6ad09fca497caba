"""Cases of several ranks: the communication cards in worlds of 1, 2 and 4 processes, and what befalls ranks.

Ids are `ranks(op=...,world=...)`. They need the backend's communicator, and a device for each rank where it says that
ranks cannot share one. Kernels of the communication group are used where the backend offers them, else the references
over its communicator; that the cards are right for one rank, in guarded memory, is seen with all other ops.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator
from typing import Any

from deepinfer_hal.backend import Backend
from deepinfer_hal.conformance.cases import SystemCase
from deepinfer_hal.conformance.rank_threads import run_threads
from deepinfer_hal.conformance.ranks import Answer, RankProcesses, Seat
from deepinfer_hal.conformance.verdict import CheckFailed, Declined

WORLDS = (1, 2, 4)
JOBS, MOE_JOBS = "deepinfer_hal.conformance.rank_jobs", "deepinfer_hal.conformance.rank_moe"
DEADLINE_SECONDS = 10.0
SHORT_DEADLINE_SECONDS = 2.0
"""Where a rank dies or is late: the others must name it within this."""

BUSY_SECONDS = 0.5
"""What a busy machine may take on top to run the rank that waits."""

WHY = {
    "all_reduce": "Every rank gets the same sum, to the bit, in every run.",
    "all_gather": "Ranks with few rows or none take part like any other.",
    "broadcast": "Any rank can be the one whose tensor counts.",
    "barrier": "Nobody leaves before the last has come.",
    "dispatch_and_combine": "Every row arrives once, at its expert and in its place, and is summed where it came from.",
    "moe_layer": "Experts spread over ranks give the bits of one rank.",
}


def communication_cases() -> Iterator[SystemCase]:
    """Every op in every world; a late rank, a rank killed before and in a call, a rank in another call."""
    for op, why in WHY.items():
        for world in WORLDS:
            yield SystemCase(
                f"ranks(op={op},world={world})", why, functools.partial(_op, op=op, world=world), group="ranks"
            )
    for what, why, check in (
        ("late", "A rank that comes within the deadline is no error.", _late),
        ("confused", "Ranks that make different calls are told so, and nothing moves.", _confused),
        ("dead", "A killed rank is named within the deadline.", functools.partial(_dead, when="call")),
        ("dead_in_transfer", "Also when it is killed while bytes move.", functools.partial(_dead, when="transfer")),
    ):
        for world in WORLDS[1:]:
            yield SystemCase(f"ranks({what},world={world})", why, functools.partial(check, world=world), group="ranks")


@functools.cache
def processes() -> RankProcesses:
    """This process's rank processes, ended with it."""
    made = RankProcesses(max(WORLDS))
    atexit.register(made.close)
    return made


def seats(backend: Backend, index: int, world: int) -> list[Seat]:
    """A device for each rank. Declined if the backend has no communicator or too few devices."""
    communicator = backend.communicator(index)
    if communicator is None:
        raise Declined("the backend has no communicator: one rank")
    if communicator.shares_devices:
        return [Seat.of(backend, index)] * world
    probed = {info.index: info for info in backend.probe()}
    emulated = index in probed and probed[index].emulated
    found = [info.index for info in probed.values() if info.emulated == emulated]
    if len(found) < world:
        raise Declined(f"{world} ranks need {world} devices, there are {len(found)}")
    return [Seat.of(backend, device) for device in found[:world]]


def _run(backend: Backend, index: int, job: str, world: int, deadline_s: float, **params: Any) -> list[Answer]:
    communicator = backend.communicator(index)
    if communicator is not None and communicator.in_process:
        return run_threads(job, world, backend, [index] * world, deadline_s=deadline_s, params=params)
    return processes().run(job, world, seats(backend, index, world), deadline_s=deadline_s, params=params)


def _all_ok(answers: list[Answer]) -> list[Any]:
    for answer in answers:
        if answer.error == "Declined":
            raise Declined(answer.message)
    wrong = [f"rank {rank} {answer}" for rank, answer in enumerate(answers) if not answer.ok]
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return [answer.value for answer in answers]


def _op(backend: Backend, index: int, op: str, world: int) -> dict[str, Any]:
    values = _all_ok(_run(backend, index, f"{MOE_JOBS if op == 'moe_layer' else JOBS}:{op}", world, DEADLINE_SECONDS))
    if op in ("all_reduce", "all_gather") and len({value["digest"] for value in values}) > 1:
        raise CheckFailed(f"ranks have different bits: {[value['digest'][:8] for value in values]}")
    if op == "barrier" and min(value["left"] for value in values) < max(value["came"] for value in values):
        raise CheckFailed("a rank left the barrier before the last came")
    return {"world": world}


def _late(backend: Backend, index: int, world: int) -> None:
    _all_ok(_run(backend, index, f"{JOBS}:late", world, SHORT_DEADLINE_SECONDS, who=world - 1))


def _dead(backend: Backend, index: int, world: int, when: str) -> dict[str, Any]:
    who = world // 2
    answers = _run(backend, index, f"{JOBS}:dead", world, SHORT_DEADLINE_SECONDS, who=who, when=when)
    if not answers[who].died:
        raise CheckFailed(f"rank {who} was to die, but {answers[who]}")
    values = _all_ok([answer for rank, answer in enumerate(answers) if rank != who])
    for value in values:
        if value["named"] != [who]:
            raise CheckFailed(f"rank {who} died, but the error names {value['named']}: {value['message']}")
        if value["waited"] > SHORT_DEADLINE_SECONDS + BUSY_SECONDS:
            raise CheckFailed(f"rank {who} was named after {value['waited']:.2f} s, the deadline is {SHORT_DEADLINE_SECONDS} s")
    return {"waited_s": max(value["waited"] for value in values)}


def _confused(backend: Backend, index: int, world: int) -> None:
    who = world - 1
    for value in _all_ok(_run(backend, index, f"{JOBS}:confused", world, SHORT_DEADLINE_SECONDS, who=who)):
        if world > 2 and value["named"] != [who]:
            raise CheckFailed(f"rank {who} made another call, but the error names {value['named']}")
