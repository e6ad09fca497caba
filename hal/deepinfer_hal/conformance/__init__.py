"""The conformance suite: does a kernel do what its card says? See docs/conformance.md."""

from deepinfer_hal.conformance.checks import CHECKS, CORE, FULL, Check, Checks, Profile
from deepinfer_hal.conformance.execute import run_case, run_op
from deepinfer_hal.conformance.plan import Plan
from deepinfer_hal.conformance.problem import Problem, Subject
from deepinfer_hal.conformance.runner import Run, run_suite
from deepinfer_hal.conformance.verdict import CaseResult, CheckFailed

__all__ = [
    "CHECKS",
    "CORE",
    "FULL",
    "CaseResult",
    "Check",
    "CheckFailed",
    "Checks",
    "Plan",
    "Problem",
    "Profile",
    "Run",
    "Subject",
    "run_case",
    "run_op",
    "run_suite",
]
