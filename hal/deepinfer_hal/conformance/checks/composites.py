"""A composite equals its decomposition, run by the same backend's kernels of the parts."""

from types import SimpleNamespace

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import compare_discrete, compare_values
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed


def run(problem: Problem, profile: Profile) -> None:
    parts = SimpleNamespace(**{op: problem.subject.part(op) for op in problem.card.decomposition})
    placed = problem.place()
    try:
        problem.card.reference(*placed.args.values(), parts=parts)
        problem.subject.synchronize()
    except Exception as error:
        raise CheckFailed(f"the decomposition raised {type(error).__name__}: {error}") from error
    whole, _ = placed.read()
    compare_values(problem, problem.pristine, whole, problem.base, problem.written)
    compare_discrete(problem, problem.pristine, whole, problem.base, problem.written)


def applies(problem: Problem) -> bool:
    return not problem.empty and bool(problem.card.decomposition)


CHECK = Check("composites", "A fused kernel may replace its parts only if no one can tell the difference.", run, applies)
