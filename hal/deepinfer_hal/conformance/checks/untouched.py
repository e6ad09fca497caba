"""What an op does not write keeps its bits: rows past the count, rows of index -1, other rows of a cache.

The kernel runs on two different contents of its outputs; an element that the reference leaves alone must keep both.
"""

from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Args, Problem
from deepinfer_hal.conformance.verdict import CheckFailed


def run(problem: Problem, profile: Profile) -> None:
    _assert_kept(problem, problem.pristine, problem.base)
    other = problem.refilled(problem.pristine)
    _assert_kept(problem, other, problem.run(other).args)


def _assert_kept(problem: Problem, before: Args, after: Args) -> None:
    for name in problem.outputs:
        kept = ~problem.written[name]
        if name in problem.read_too:  # an updated element may keep its value by chance: judge whole rows
            kept = kept.reshape(kept.shape[0], -1).all(1).reshape(-1, *[1] * (kept.dim() - 1)).expand(kept.shape)
        changed = kept & (bits(after[name]) != bits(before[name]))
        if bool(changed.any()):
            where = changed.nonzero()[0].tolist()
            raise CheckFailed(
                f"{name}{where} must stay untouched ({before[name][tuple(where)].item()}), "
                f"it became {after[name][tuple(where)].item()}; {int(changed.sum())} elements changed"
            )


CHECK = Check("untouched", "Rows past the count, index -1 and other rows of a store keep every bit.", run)
