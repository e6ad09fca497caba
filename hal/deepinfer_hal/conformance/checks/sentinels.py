"""Guards before and after every storage and in the gaps between rows: not one byte may change."""

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.checks.views import gaps_of
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed


def run(problem: Problem, profile: Profile) -> None:
    for gaps in ({}, gaps_of(problem)):
        ran = problem.run(gaps=gaps)
        damage = ran.placed.damaged(ran.images)
        if damage:
            raise CheckFailed(damage)


CHECK = Check("sentinels", "A write outside the outputs corrupts another request, long after; every byte around is watched.", run)
