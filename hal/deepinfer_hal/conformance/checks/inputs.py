"""Inputs and weights keep their bits."""

from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed


def run(problem: Problem, profile: Profile) -> None:
    written = {problem.pristine[name].untyped_storage().data_ptr() for name in problem.outputs if problem.pristine[name].numel()}
    for arg in problem.card.signature:
        value = problem.pristine[arg.name]
        if value is None:
            continue
        if arg.kind == "in" and value.numel() and value.untyped_storage().data_ptr() not in written:
            changed = bits(problem.base[arg.name]) != bits(value)
            if bool(changed.any()):
                raise CheckFailed(f"the kernel wrote its input {arg.name}{changed.nonzero()[0].tolist()}")
        elif arg.kind == "weight":
            held, wanted = problem.weight(value).canonical(), value.canonical()
            if bool((bits(held.values.cpu()) != bits(wanted.values)).any()):
                raise CheckFailed(f"the kernel wrote its weight {arg.name}")


CHECK = Check("inputs", "Inputs and weights are shared by later layers and requests; a call leaves them alone.", run)
