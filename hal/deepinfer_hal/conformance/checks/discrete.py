"""Codes, experts, rows and tokens: equal everywhere, ties to the lower index, excused only at a decision boundary."""

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import compare_discrete
from deepinfer_hal.conformance.problem import Problem


def run(problem: Problem, profile: Profile) -> None:
    compare_discrete(problem, problem.pristine, problem.expected, problem.base, problem.written)


def applies(problem: Problem) -> bool:
    return not problem.empty and bool(problem.card.discrete)


CHECK = Check("discrete", "A choice differs from the reference's only where FP32 cannot tell the candidates apart.", run, applies)
