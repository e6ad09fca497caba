"""Runs the checks of cases on a kernel, in this process."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepinfer_hal.backend import Backend
from deepinfer_hal.card import Case, Cost, OpCard
from deepinfer_hal.conformance.checks import CHECKS, Checks, Profile, get_profile
from deepinfer_hal.conformance.checks.claims import answer_of
from deepinfer_hal.conformance.problem import Problem, Subject
from deepinfer_hal.conformance.verdict import FAIL, NOT_RUN, PASS, UNSUPPORTED, CaseResult, CheckFailed, Declined
from deepinfer_hal.kernel import Kernel, No

TIMED_CALLS = 5

Args = Mapping[str, Any]


def run_op(
    card: OpCard,
    kernel: Kernel,
    profile: str | Profile = "core",
    checks: Checks = CHECKS,
    *,
    cases: Iterable[Case] | None = None,
    backend: Backend | None = None,
    index: int = 0,
    parts: Mapping[str, Kernel] | None = None,
    seed: int = 0,
) -> list[CaseResult]:
    """Every check of every case of a card on one kernel; by default the cases of the profile.

    backend, index: whose device and weight layouts the kernel takes (default: host memory, the checkpoint's layout).
    parts: kernels of other ops, for composites (default: the references).
    """
    from deepinfer_hal.conformance.cases import op_cases

    profile = get_profile(profile)
    chosen = list(op_cases(card, profile) if cases is None else cases)
    subject = Subject(card, kernel, backend, index, parts or {})
    first = first_with_rows(card, chosen)
    shared = share_repetitions(profile, len(chosen))
    return [run_case(subject, case, shared, checks, seed=seed, first=case.id == first) for case in chosen]


def first_with_rows(card: OpCard, cases: Iterable[Case]) -> str | None:
    """Id of the first case that is no empty problem."""
    from deepinfer_hal.conformance import rows
    from deepinfer_hal.weights import prepare_canonical

    for case in cases:
        if rows.valid_rows(card, card.generate(case, 0, "cpu", prepare_canonical)):
            return case.id
    return None


EMULATED_REPEAT_SECONDS = 20.0
"""Time for repetitions of one op on an emulated device, beyond the thousand that its cases share."""


def share_repetitions(profile: Profile, cases: int, emulated: bool = False) -> Profile:
    """The profile with the time for repetitions of one op shared by its cases.

    On an emulated device a call costs a thousand times a chip's: a profile without a limit of time gets one there, and
    the cases of an op make `profile.repetitions` together, however long that takes.
    """
    from dataclasses import replace

    cases, seconds, least = max(cases, 1), profile.repeat_seconds, profile.repeat_least
    if emulated and math.isinf(seconds):
        seconds, least = EMULATED_REPEAT_SECONDS, max(-(-profile.repetitions // cases), least)
    return replace(profile, repeat_seconds=seconds / cases, repeat_least=least)


def run_case(
    subject: Subject,
    case: Case,
    profile: Profile,
    checks: Checks = CHECKS,
    *,
    seed: int = 0,
    first: bool = True,
    pristine: Args | None = None,
    on_check: Callable[[str], None] = lambda name: None,
) -> CaseResult:
    """All checks on one case. Never raises for what the kernel does; `on_check` hears of each check before it runs."""
    started = time.perf_counter()
    kernel = subject.kernel
    result = CaseResult(case.id, case.op, kernel.provider, kernel.symbol, seed=seed)
    on_check("generate")
    problem = Problem(subject, case, seed, first=first, pristine=pristine)
    reason = _reason_not_to_run(problem)
    for check in checks.values():
        if (reason is None or check.name == "claims") and (check.applies(problem) or reason is not None):
            on_check(check.name)
            _apply(check, problem, profile, result)
    if reason is None and not result.failures and result.checks and not result.reason:
        on_check("time")
        _measure(problem, result)
    _conclude(result, reason)
    for name, values in problem.statistics.items():
        setattr(result, name, values)
    result.seconds = time.perf_counter() - started
    return result


def _reason_not_to_run(problem: Problem) -> str | None:
    """The kernel's No, or None. A malformed answer is for the check `claims` to report."""
    try:
        answer = answer_of(problem.kernel, problem.spec)
    except CheckFailed:
        return None
    return answer.reason if isinstance(answer, No) else None


def _apply(check: Any, problem: Problem, profile: Profile, result: CaseResult) -> None:
    try:
        check.run(problem, profile)
    except CheckFailed as error:
        result.failures[check.name] = str(error)
    except Declined as error:
        result.reason = f"the kernel raised Unsupported: {error}"
        return
    except Exception as error:  # a check that cannot be carried out is no pass
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        result.failures[check.name] = f"the check could not be carried out: {type(error).__name__}: {error} ({place})"
    result.checks.append(check.name)


def _conclude(result: CaseResult, reason: str | None) -> None:
    if result.failures:
        result.verdict = FAIL
    elif reason is not None or result.reason:
        result.verdict, result.reason = UNSUPPORTED, reason or result.reason
    elif result.checks:
        result.verdict = PASS
    else:
        result.verdict, result.reason = NOT_RUN, "no check applies to this case"


def _measure(problem: Problem, result: CaseResult) -> None:
    """Median time of a call, and what the card says it must cost."""
    placed = problem.place()
    clock = problem.subject.backend.timer(problem.subject.index) if problem.subject.backend else time.perf_counter
    times = []
    for _ in range(TIMED_CALLS):
        start = clock()
        problem.call(placed.args)
        times.append(clock() - start)
    cost: Cost = problem.card.cost(problem.pristine)
    result.kernel_seconds = sorted(times)[TIMED_CALLS // 2]
    result.bytes, result.flops = int(cost.bytes), int(cost.flops)
