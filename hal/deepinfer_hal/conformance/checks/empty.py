"""Problems without rows: no error, and nothing written but what the card says of an empty problem."""

from deepinfer_hal.conformance import rows
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import assert_same_bits
from deepinfer_hal.conformance.problem import Problem


def run(problem: Problem, profile: Profile) -> None:
    args = problem.pristine if problem.empty else rows.with_count(problem.card, problem.pristine, 0)
    expected, ran = problem.reference(args), problem.run(args)
    for name in problem.outputs:
        assert_same_bits(ran.args[name], expected[name], name, "with no valid row")
    damage = ran.placed.damaged(ran.images)
    if damage:
        from deepinfer_hal.conformance.verdict import CheckFailed

        raise CheckFailed(f"with no valid row {damage}")


def applies(problem: Problem) -> bool:
    return problem.empty or (problem.first and rows.count_arg(problem.card) is not None)


CHECK = Check("empty", "Zero tokens, requests or experts are an ordinary problem: no error, nothing written.", run, applies)
