"""Values of float and quantised outputs against the float64 reference."""

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import compare_values
from deepinfer_hal.conformance.problem import Problem


def run(problem: Problem, profile: Profile) -> None:
    compare_values(problem, problem.pristine, problem.expected, problem.base, problem.written)


CHECK = Check("values", "Every value is within the card's tolerance of the float64 reference.", run)
