"""Ranks as processes: what the communication cards say holds in worlds of 1, 2 and 4, and whoever is missing is named.

All tests share four rank processes, which play one world after another; one that is killed is replaced.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from deepinfer_cpu.backend import CpuBackend
from deepinfer_hal.card import get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.communicator import SingleRank, World
from deepinfer_hal.conformance.communication import communication_cases, processes
from deepinfer_hal.conformance.ranks import Answer, Seat
from deepinfer_hal.conformance.verdict import CheckFailed, Declined
from deepinfer_hal.errors import BadCall, CommunicatorError, CommunicatorMismatch, CommunicatorTimeout, DeepInferError
from deepinfer_hal.ops._communication import arrivals, landings, sort_pairs
from deepinfer_hal.reference_communicator import ReferenceCommunicator, serve_store

from tests.processes import jobs

CPU = CpuBackend()
CASES = {case.id: case for case in communication_cases()}
DEADLINE, BUSY = 2.0, 1.0


def run(job: str, size: int, backend: CpuBackend = CPU, deadline_s: float = DEADLINE, **params) -> list[Answer]:
    return processes().run(job, size, [Seat.of(backend, 0)] * size, deadline_s=deadline_s, params=params)


def values(job: str, size: int, **params) -> list:
    answers = run(f"tests.processes.jobs:{job}", size, **params)
    assert all(answer.ok for answer in answers), [str(answer) for answer in answers]
    return [answer.value for answer in answers]


# ------------------------------------------------------------------------------------------------- what holds


@pytest.mark.parametrize("id", CASES)
def test_the_suites_cases_of_several_ranks_pass(id):
    CASES[id].run(CPU, 0)


@pytest.mark.parametrize("job", ["rank_jobs:dispatch_and_combine", "rank_moe:moe_layer"])
def test_two_runs_give_the_same_bits_on_every_rank(job):
    once, again = (run(f"deepinfer_hal.conformance.{job}", 2, deadline_s=10.0) for _ in range(2))
    assert all(answer.ok for answer in (*once, *again))
    assert [answer.value for answer in once] == [answer.value for answer in again]


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (jobs.LosesAToken, "ranks(op=dispatch_and_combine,world=2)"),
        (jobs.MixesUpSources, "ranks(op=dispatch_and_combine,world=2)"),
        (jobs.WritesPastTheRows, "ranks(op=dispatch_and_combine,world=1)"),
        (jobs.AddsTwice, "ranks(op=dispatch_and_combine,world=2)"),
        (jobs.AddsTwice, "ranks(op=moe_layer,world=2)"),
        (jobs.ForgetsARank, "ranks(op=all_gather,world=2)"),
        (jobs.SumsOnOneRank, "ranks(op=all_reduce,world=2)"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_backend_that_moves_rows_wrongly_fails(broken, case):
    with pytest.raises(CheckFailed):
        CASES[case].run(broken(), 0)


def test_a_backend_without_a_communicator_is_not_judged():
    class Alone(CpuBackend):
        name = "alone"

        def communicator(self, index):
            return None

    with pytest.raises(Declined, match="no communicator"):
        CASES["ranks(op=barrier,world=2)"].run(Alone(), 0)


# --------------------------------------------------------------------------------------------- who is missing


def test_a_rank_that_lives_but_does_not_come_is_named_at_the_deadline_and_told_that_the_others_left():
    first, *others = values("stuck", 3, who=0)
    for told, later in others:
        assert (told["error"], told["ranks"]) == ("CommunicatorTimeout", [0])
        assert "rank 0 is alive but did not come within 2 s" in told["message"] or "missed by" in told["message"]
        assert told["waited"] < DEADLINE + BUSY
        assert later["error"] == "CommunicatorError" and "is broken since" in later["message"] and later["waited"] < 0.5
    assert first[0]["error"] == "CommunicatorTimeout" and set(first[0]["ranks"]) <= {1, 2} and "has left" in first[0]["message"]


def test_a_rank_that_never_joins_is_named():
    for rank, told in enumerate(values("absent", 4, who=2)):
        if rank != 2:
            assert (told["error"], told["ranks"]) == ("CommunicatorTimeout", [2])
            assert "did not join" in told["message"] or "missed by" in told["message"]
            assert told["waited"] < DEADLINE + BUSY


def test_a_rank_that_closed_is_named_at_once():
    for rank, told in enumerate(values("leaves", 2, who=1, deadline_s=10.0)):
        if rank != 1:
            assert (told["error"], told["ranks"]) == ("CommunicatorTimeout", [1])
            assert "rank 1 has left" in told["message"] and told["waited"] < 5


def test_a_bound_that_is_too_small_is_refused_on_every_rank_and_the_next_call_is_served():
    for refused, served in values("no_room", 2):
        assert refused["error"] == "BadCall" and "rank 1 is sent 12 rows, but its out has room for 11" in refused["message"]
        assert served["error"] == ""


def test_a_row_that_does_not_come_back_is_named():
    told = values("lost_row", 2)
    assert [one["error"] for one in told] == ["", "BadCall"]
    assert "choice 0 of token 1 went to row 3 of rank 1, but it did not come back" in told[1]["message"]


def test_a_store_that_is_gone_is_an_error_that_says_where_it_was():
    store = serve_store()
    world = World(0, 2, port=store.port, name="gone", deadline_s=0.5)
    del store
    started = time.monotonic()
    with pytest.raises(CommunicatorError, match=f"127.0.0.1:{world.port}"):
        ReferenceCommunicator.open(world, torch.device("cpu"))
    assert time.monotonic() - started < 20  # torch tries again and again, each time for the deadline


# ------------------------------------------------------------------------------------------------- one rank


def test_one_rank_needs_no_store():
    comm = ReferenceCommunicator.open(World(0, 1), torch.device("cpu"))
    assert isinstance(comm, SingleRank) and comm.exchange("anything", (3, 4)) == [(3, 4)]
    comm.close()


@pytest.mark.parametrize(("rank", "size", "deadline_s"), [(2, 2, 1.0), (-1, 2, 1.0), (0, 0, 1.0), (0, 1, 0.0)])
def test_a_world_that_cannot_be_is_refused(rank, size, deadline_s):
    with pytest.raises(BadCall):
        World(rank, size, deadline_s=deadline_s)


def test_a_call_without_a_communicator_or_with_room_for_another_world_is_refused():
    card = get_card("all_gather")
    x = torch.zeros(2, 3)
    with pytest.raises(BadCall, match="comm must be a Communicator, got str"):
        check_call(card, card.bind_args(("ranks", x, None, torch.zeros(1, 2, 3), None), {}))
    with pytest.raises(BadCall, match="world = 2"):
        check_call(card, card.bind_args((SingleRank(), x, None, torch.zeros(2, 2, 3), None), {}))


def test_errors_of_ranks_are_errors_of_this_project():
    assert issubclass(CommunicatorTimeout, CommunicatorError) and issubclass(CommunicatorError, DeepInferError)
    assert issubclass(CommunicatorMismatch, BadCall)


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_of_a_dispatch_is_permute_over_all_ranks_cut_into_ranks(seed):
    rng = np.random.default_rng(seed)
    world, experts = int(rng.choice([1, 2, 4])), int(rng.integers(1, 5))
    ids = [rng.integers(-1, world * experts, size=int(rng.choice([0, 1, 7, 30]))) for _ in range(world)]
    plans = [sort_pairs(one, world * experts) for one in ids]
    counts = np.stack([count for _, count in plans])
    together = np.concatenate([np.stack((np.full(one.size, r), np.arange(one.size), one), axis=1) for r, one in enumerate(ids)])
    together = together[together[:, 2] >= 0]
    together = together[np.argsort(together[:, 2], kind="stable")]
    for rank in range(world):
        order, sources, offsets = arrivals(counts, rank)
        sent = [plans[r][0][ids[r][plans[r][0]] // experts == rank] for r in range(world)]
        received = np.concatenate(sent)[order]
        wanted = together[together[:, 2] // experts == rank]
        assert np.array_equal(np.stack((sources, received), axis=1), wanted[:, :2])
        assert np.array_equal(np.diff(offsets), [(wanted[:, 2] == rank * experts + e).sum() for e in range(experts)])
        to, rows = landings(counts, rank)
        for pair, owner, row in zip(plans[rank][0], to, rows, strict=True):
            there = together[together[:, 2] // experts == owner]
            assert tuple(there[row][:2]) == (rank, pair)
