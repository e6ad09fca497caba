"""Backends whose ranks lose rows, add in another order, do not wait, or do not see who is missing.

Every class is opened again in each rank's process, so it takes no arguments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from deepinfer_hal.backend import Backend
from deepinfer_hal.card import get_card
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.conformance.communication import communication_cases
from deepinfer_hal.conformance.verdict import CheckFailed
from deepinfer_hal.errors import CommunicatorTimeout
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.reference_communicator import ReferenceCommunicator

from tests.conformance.mutants import weights
from tests.conformance.mutants._base import Args, Host, changed, kernel, spoiled

WORLD = 2
CASES = {case.id: case for case in communication_cases() if f"world={WORLD})" in case.id}
OPS = tuple(id for id in CASES if "op=" in id)


@dataclass(frozen=True)
class RankMutant:
    """A backend class of several ranks that is wrong in one way. killed_by: cases that fail, of `OPS` and those named."""

    name: str
    backend: type[Backend]
    killed_by: tuple[str, ...]
    why: str

    def run(self) -> tuple[str, ...]:
        """Ids of the cases that fail on it, of `OPS` and those that it names."""
        return failures(self.backend(), tuple(dict.fromkeys((*OPS, *self.killed_by))))


def failures(backend: Backend, ids: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the cases that fail on a backend."""
    failed = []
    for id in ids:
        try:
            CASES[id].run(backend, 0)
        except CheckFailed:
            failed.append(id)
    return tuple(failed)


class Ranked(Host):
    """A host with the reference communicator, and `fn` in place of the reference of `op`."""

    _op = ""
    _meets = ReferenceCommunicator

    def __init__(self) -> None:
        super().__init__()

    def communicator(self, index: int) -> type[Communicator] | None:
        return self._meets

    def kernels(self, index: int) -> tuple[Kernel, ...]:
        return (kernel(self._op, self.name, self._fn(), "yes"),) if self._op else ()

    def _fn(self) -> Callable[..., None]:
        raise NotImplementedError


class SumsOnOneRank(Ranked):
    name, _op = "one", "all_reduce"

    def _fn(self) -> Callable[..., None]:
        def own_value(args: Args) -> None:
            if args["comm"].rank:
                args["out"].copy_(args["x"])

        return spoiled("all_reduce", own_value)


class ForgetsARow(Ranked):
    name, _op = "forgets", "all_gather"

    def _fn(self) -> Callable[..., None]:
        def first_rank_again(args: Args) -> None:
            args["out"][-1, :1] = args["out"][0, :1]

        return spoiled("all_gather", first_rank_again)


class SameRoot(Ranked):
    name, _op = "root", "broadcast"

    def _fn(self) -> Callable[..., None]:
        return changed("broadcast", lambda args: {"root": 0})


class WaitsForNobody(Ranked):
    name, _op = "nobody", "barrier"

    def _fn(self) -> Callable[..., None]:
        return lambda comm: None


class LosesAToken(Ranked):
    name, _op = "loses", "ep_dispatch"

    def _fn(self) -> Callable[..., None]:
        def last_expert_is_short(args: Args) -> None:
            last = args["offsets"][-1]
            if int(last):
                args["offsets"] -= (args["offsets"] == last).int()

        return spoiled("ep_dispatch", last_expert_is_short)


class WritesPastTheRows(Ranked):
    name, _op = "past", "ep_dispatch"

    def _fn(self) -> Callable[..., None]:
        def clear_the_last(args: Args) -> None:
            args["out"][-1] = 0

        return spoiled("ep_dispatch", clear_the_last)


def as_they_arrive(rows, inverse, shared, count, out) -> None:
    """Starts from the shared row, which is here first, and adds expert rows in the order in which they came."""
    total = torch.zeros(out.shape) if shared is None else shared.float()
    for column in inverse.sort(dim=1).values.unbind(1):
        valid = column >= 0
        total[valid] = total[valid] + rows[column[valid].long()].float()
    out.copy_(total)


class AddsAsTheyArrive(Ranked):
    name, _op = "arrive", "ep_combine"

    def _fn(self) -> Callable[..., None]:
        def fn(*values: Any) -> None:
            with mock.patch.dict(get_card("ep_combine").reference.__globals__, unpermute=as_they_arrive):
                get_card("ep_combine").reference(*values)

        return fn


class Impatient(ReferenceCommunicator):
    def _wait_for_all(self, deadline: float) -> None:
        super()._wait_for_all(deadline - 0.75 * self.deadline_s)


class Patient(ReferenceCommunicator):
    """Waits for twice the deadline and looks at no heart before."""

    def _wait_for_all(self, deadline: float) -> None:
        others = [self._key(rank) for rank in range(self.world_size) if rank != self.rank]
        while time.monotonic() < deadline + self.deadline_s and not self._store.check(others):
            time.sleep(0.01)
        super()._wait_for_all(deadline)


class Trusting(ReferenceCommunicator):
    """Does not compare what the ranks call."""

    def _compare(self, calls: list[str]) -> None:
        pass


class Nameless(ReferenceCommunicator):
    """A transfer that fails is an error of the transport, whoever died."""

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._break(str(error))
            raise CommunicatorTimeout(f"the transfer failed: {error}") from error


class GivesUpEarly(Ranked):
    name, _meets = "early", Impatient


class WaitsTooLong(Ranked):
    name, _meets = "long", Patient


class ComparesNothing(Ranked):
    name, _meets = "nothing", Trusting


class NamesNobody(Ranked):
    name, _meets = "nameless", Nameless


class KeepsExpertsByNumber(Ranked):
    """Expert 0 of a rank is looked up as the expert 0 that an earlier weight of the role had."""

    name = "by_number"
    prepare_weight = weights.StaleSlots.prepare_weight

    def __init__(self) -> None:
        super().__init__()
        self._slots: dict = {}


def op(*names: str) -> tuple[str, ...]:
    return tuple(f"ranks(op={name},world={WORLD})" for name in names)


def event(name: str) -> tuple[str, ...]:
    return (f"ranks({name},world={WORLD})",)


MUTANTS = [
    RankMutant("sum_on_one_rank", SumsOnOneRank, op("all_reduce"), "Ranks but the first keep their own values."),
    RankMutant("gathered_row_forgotten", ForgetsARow, op("all_gather"), "The last rank's first row is another rank's."),
    RankMutant("broadcast_from_rank_zero", SameRoot, op("broadcast"), "Rank 0 is the root, whoever was named."),
    RankMutant("barrier_without_waiting", WaitsForNobody, op("barrier"), "A rank leaves before the last has come."),
    RankMutant("dispatch_loses_a_row", LosesAToken, op("dispatch_and_combine", "moe_layer"),
               "The last expert's last row is not counted."),
    RankMutant("dispatch_past_the_rows", WritesPastTheRows, op("dispatch_and_combine"),
               "Room for rows that nobody sent is cleared."),
    RankMutant("combine_in_order_of_arrival", AddsAsTheyArrive, op("dispatch_and_combine"),
               "Rows are added as they arrive instead of in the order of the token's choices."),
    RankMutant("experts_kept_by_number", KeepsExpertsByNumber, op("moe_layer"),
               "A rank multiplies with the experts of another, which have the same numbers there."),
    RankMutant("gives_up_early", GivesUpEarly, event("late"), "A rank is missed after a quarter of the deadline."),
    RankMutant("different_calls_unnoticed", ComparesNothing, event("confused"), "Ranks that call different ops go on."),
    RankMutant("dead_rank_unnoticed", WaitsTooLong, event("dead"), "A dead rank is waited for beyond the deadline."),
    RankMutant("death_in_transfer_unnamed", NamesNobody, event("dead_in_transfer"),
               "When a rank dies while bytes move, the error does not say who."),
]  # fmt: skip
