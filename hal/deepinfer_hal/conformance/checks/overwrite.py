"""What an output held before must not show in what is written."""

from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed


def run(problem: Problem, profile: Profile) -> None:
    if _uses_old_content(problem):
        return
    other = problem.run(problem.refilled(problem.pristine)).args
    for name in problem.outputs:
        if name in problem.read_too:
            continue
        differs = problem.written[name] & (bits(other[name]) != bits(problem.base[name]))
        if bool(differs.any()):
            where = differs.nonzero()[0].tolist()
            raise CheckFailed(f"{name}{where} depends on what the output held before the call")


def _uses_old_content(problem: Problem) -> bool:
    """Whether the reference itself carries old content over, as flags that are or-ed and copies within a store do."""
    other = problem.reference(problem.refilled(problem.pristine))
    return any(
        bool((problem.written[name] & (bits(other[name]) != bits(problem.expected[name]))).any())
        for name in problem.outputs
        if name not in problem.read_too
    )


CHECK = Check("overwrite", "Outputs are written, not accumulated into: poison there never shows.", run)
