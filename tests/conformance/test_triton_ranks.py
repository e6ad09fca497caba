"""The kernels of the communication group in Triton's interpreter: one rank against the cards, several as processes.

Needs Triton and TRITON_INTERPRET=1: `tests/triton/test_toolchains.py` runs this file inside the environment that has them.
"""

from __future__ import annotations

import os

import pytest
from deepinfer_hal.conformance.communication import communication_cases, processes
from deepinfer_hal.conformance.ranks import Answer, Seat
from harness import case_id, cases_of, run_case

pytest.importorskip("triton", reason="Triton is not in this environment; tests/triton/test_toolchains.py runs this file")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from deepinfer_triton.ranks import rank_kernels  # noqa: E402
from deepinfer_triton.targets import ASCEND950, INTERPRETER  # noqa: E402

from tests.conformance.rank_kernels_on_host import RanksOnHost  # noqa: E402

KERNELS = {kernel.op: kernel for kernel in rank_kernels(INTERPRETER)}
CASES = {case.id: case for case in communication_cases() if "world=1" not in case.id}
QUICK = [id for id in CASES if "world=2" in id and any(part in id for part in ("op=dispatch", "op=all", "confused", "transfer"))]
DEADLINE = 3.0


def values(job: str, size: int, **params) -> list:
    backend = RanksOnHost()
    answers: list[Answer] = processes().run(
        f"tests.conformance.rank_kernels_on_host:{job}", size, [Seat.of(backend, 0)] * size, deadline_s=DEADLINE, params=params
    )
    assert all(answer.ok or answer.died == "SIGKILL" for answer in answers), [str(answer) for answer in answers]
    return [answer.value for answer in answers]


SMALL, LARGE = (
    [pair for pair in cases_of(*KERNELS) if (pair[1].params.get("E") == 384) == large] for large in (False, True)
)


@pytest.mark.parametrize(("card", "case"), SMALL, ids=case_id)
def test_a_kernel_agrees_with_its_card_on_one_rank(card, case):
    run_case(card, case, KERNELS[card.name])


@pytest.mark.full
@pytest.mark.parametrize(("card", "case"), LARGE, ids=case_id)
def test_a_kernel_agrees_with_its_card_at_size_on_one_rank(card, case):
    run_case(card, case, KERNELS[card.name])


def test_every_communication_card_has_a_kernel_and_an_npu_gets_none():
    assert set(KERNELS) == {"all_reduce", "all_gather", "broadcast", "barrier", "ep_dispatch", "ep_combine"}
    assert all(kernel.invariant == "yes" and not kernel.capturable for kernel in KERNELS.values())
    assert rank_kernels(ASCEND950) == []


@pytest.mark.parametrize("id", [id if id in QUICK else pytest.param(id, marks=pytest.mark.full) for id in CASES])
def test_the_suites_cases_of_several_ranks_pass(id):
    CASES[id].run(RanksOnHost(), 0)


@pytest.mark.parametrize(("world", "rounds"), [(2, 3), pytest.param(3, 6, marks=pytest.mark.full)])
def test_calls_through_both_halves_of_the_windows_give_the_same_bits_whoever_is_late(world, rounds):
    once, again = (values("many", world, rounds=rounds) for _ in range(2))
    assert once == again


def test_products_are_rounded_before_they_are_added():
    values("weighed", 2)


def test_a_refused_call_writes_nothing_on_any_rank_and_the_next_is_served():
    for small, enough, wide, confused, served in values("refused", 2):
        assert small["error"] == "BadCall" and "rank 1 is sent 12 rows, but its out has room for 11" in small["message"]
        assert wide["error"] == "Unsupported" and "rank 1 needs room for 12 rows in its window" in wide["message"]
        assert confused["error"] == "CommunicatorMismatch" and "rank 1 called ep_dispatch(f32[_, 32], k=1" in confused["message"]
        assert enough["error"] == served["error"] == ""


def test_a_row_that_does_not_come_back_is_named_where_it_is_missed():
    first, second = values("lost", 2)
    assert [one["error"] for one in first] == ["", "", "BadCall"]
    assert [one["error"] for one in second] == ["BadCall", "", "BadCall"]
    assert "choice 0 of token 1 went to row 3 of rank 1, but it did not come back" in second[0]["message"]


@pytest.mark.parametrize(("when", "world"), [("dead", 2), pytest.param("late", 3, marks=pytest.mark.full)])
def test_a_rank_that_does_not_come_is_named_at_the_deadline_and_nothing_hangs(when, world):
    for rank, told in enumerate(values("gone", world, who=1, when=when)):
        if rank != 1:
            first, second = told
            assert (first["error"], first["ranks"]) == ("CommunicatorTimeout", [1])
            assert ("is dead" if when == "dead" else "is alive but did not come") in first["message"]
            assert first["waited"] < DEADLINE + 1
            assert second["error"] == "CommunicatorError" and "is broken since" in second["message"]
