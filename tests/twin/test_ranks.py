"""Expert parallelism on ranks of the twin: the kernels are the references bit for bit, and who is missing is named."""

from __future__ import annotations

import probes
import pytest
from deepinfer_ascend import ranks as twin_ranks
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend
from deepinfer_hal.conformance.communication import communication_cases
from deepinfer_hal.conformance.rank_threads import run_threads
from deepinfer_hal.conformance.ranks import Answer

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

BACKEND = AscendBackend()
CASES = {case.id: case for case in communication_cases()}
DEADLINE = 1.0


def run(job: str, size: int, **params) -> list[Answer]:
    path = job if ":" in job else f"tests.twin.rank_jobs:{job}"
    return run_threads(path, size, BACKEND, [TWIN_INDEX] * size, deadline_s=DEADLINE, params=params)


def values(job: str, size: int, **params) -> list:
    answers = run(job, size, **params)
    assert all(answer.ok for answer in answers), [str(answer) for answer in answers]
    return [answer.value for answer in answers]


@pytest.mark.parametrize("id", CASES)
def test_the_suites_cases_of_several_ranks_pass(id):
    CASES[id].run(BACKEND, TWIN_INDEX)


@pytest.mark.parametrize(
    ("loads", "kind", "coded", "weighed"),
    [
        ((7,), "random", True, True),
        ((5, 70), "random", True, True),
        ((0, 9), "holes", False, True),
        ((4, 0), "one", False, False),
        ((5, 0, 9, 2), "holes", True, True),
        ((0, 0, 0, 3), "random", False, False),
        ((0, 0, 0, 0), "random", True, True),
        ((3, 41, 1, 17), "one", False, True),
    ],
)
def test_rows_and_sums_are_those_of_the_reference_communicator(loads, kind, coded, weighed):
    received = values("against_reference", len(loads), loads=loads, kind=kind, coded=coded, weighed=weighed, seed=len(kind))
    most = sum(loads) * 3
    assert sum(received) == most if kind != "holes" else 0 < sum(received) < most


def test_a_rank_that_comes_within_the_deadline_is_no_error():
    assert values("in_turn", 3) == [DEADLINE] * 3


@pytest.mark.parametrize("how", ["dies", "late"])
def test_a_rank_that_a_kernel_waits_for_in_vain_is_named(how):
    answers = run("missing", 3, who=1, how=how)
    for rank in (0, 2):
        first, later = answers[rank].value
        assert (first["error"], first["ranks"]) == ("CommunicatorTimeout", [1])
        why = "rank 1 died" if how == "dies" else "rank 1 is alive but did not come in time"
        assert f"the kernel of rank {rank} waited for the counts, but {why}" in first["message"]
        assert first["waited"] < DEADLINE + 1.0
        assert later["error"] == "CommunicatorError" and "is broken since" in later["message"]
    if how == "late":
        assert answers[1].value[0]["ranks"] == [0, 2] and "rank 0 has left" in answers[1].value[0]["message"]
    else:
        assert answers[1].died


def test_a_bound_that_is_too_small_is_refused_on_every_rank_and_the_next_call_is_served():
    for refused, served in values("tests.processes.jobs:no_room", 2):
        assert refused["error"] == "BadCall" and "rank 1 is sent 12 rows, but its out has room for 11" in refused["message"]
        assert served["error"] == ""


def test_a_row_that_does_not_come_back_is_named():
    told = values("tests.processes.jobs:lost_row", 2)
    assert [one["error"] for one in told] == ["", "BadCall"]
    assert "choice 0 of token 1 went to row 3 of rank 1, but it did not come back" in told[1]["message"]


def test_rows_that_a_window_cannot_hold_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(twin_ranks, "WINDOW_BYTES", 17 * 1024)
    answers = run("against_reference", 2, loads=(9, 9), kind="one", coded=False, weighed=False, seed=1)
    assert {answer.error for answer in answers} == {"Unsupported"}
    assert "rank 1 is sent 54 rows, but a window has room for" in answers[0].message
