"""Calls that the card forbids are refused with BadCall before anything runs, and nothing is written."""

from collections.abc import Iterator
from typing import Any

import torch

from deepinfer_hal.card import DTYPES
from deepinfer_hal.checks import check_call
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Args, Problem
from deepinfer_hal.conformance.verdict import CheckFailed
from deepinfer_hal.errors import BadCall, Unsupported


def run(problem: Problem, profile: Profile) -> None:
    for what, args in bad_calls(problem):
        try:
            check_call(problem.card, args)
        except BadCall:
            continue
        raise CheckFailed(f"a call with {what} passes the card's check")
    for what, args in bad_strings(problem):
        _assert_kernel_refuses(problem, what, args)


def bad_calls(problem: Problem) -> Iterator[tuple[str, Args]]:
    """Variants of the call that every card must refuse: (what is wrong, arguments)."""
    args = problem.pristine
    for arg in problem.card.signature:
        value = args[arg.name]
        if not arg.optional and arg.kind in ("in", "out", "inout", "weight"):
            yield f"{arg.name} missing", {**args, arg.name: None}
        if not arg.is_tensor or value is None:
            continue
        yield f"a list for {arg.name}", {**args, arg.name: [0]}
        wrong = next(d for d in (torch.float64, torch.int16) if d not in DTYPES[arg.dtype])
        yield f"{arg.name} of {wrong}", {**args, arg.name: value.to(wrong)}
        if arg.dims != ("...",):
            yield f"{arg.name} with a dimension too many", {**args, arg.name: value[None]}


def bad_strings(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    """Host strings that name nothing. Harmless to hand to a kernel that does not look."""
    for arg in problem.card.signature:
        if arg.kind == "str" and problem.pristine[arg.name]:
            yield f"{arg.name} = 'no_such_name'", {**problem.pristine, arg.name: "no_such_name"}


def _assert_kernel_refuses(problem: Problem, what: str, args: Args) -> None:
    placed = problem.place(args)
    try:
        problem.kernel.fn(*placed.args.values())
        problem.subject.synchronize()
    except (BadCall, Unsupported):
        _, images = placed.read()
        for arena, image in zip(placed.arenas, images, strict=True):
            if not torch.equal(arena.image, image):
                names = " / ".join(arena.layouts)
                raise CheckFailed(f"with {what} the kernel refused, but had already written to {names}") from None
        return
    except Exception as error:
        raise CheckFailed(f"with {what} the kernel raised {type(error).__name__} instead of BadCall: {error}") from error
    raise CheckFailed(f"with {what} the kernel ran; it must raise BadCall before it writes anything")


def applies(problem: Problem) -> bool:
    return problem.first and not problem.empty


CHECK = Check("bad_calls", "A wrong call is a typed error before launch, never a crash or a silent write.", run, applies)
