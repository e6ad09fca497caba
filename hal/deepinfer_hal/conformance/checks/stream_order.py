"""Stream order: a call reads what was enqueued before it and is done before what is enqueued after it, without a sync."""

import torch

from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed


def run(problem: Problem, profile: Profile) -> None:
    placed, true = problem.place(), problem.place()
    inputs = [a for a in problem.card.signature if a.kind == "in" and isinstance(placed.args[a.name], torch.Tensor)]
    pairs = [(placed.args[a.name], true.args[a.name]) for a in inputs if a.dtype not in ("i32", "i64")]
    shared = {placed.args[n].untyped_storage().data_ptr() for n in problem.outputs if placed.args[n].numel()}
    pairs = [(here, there) for here, there in pairs if here.numel() and here.untyped_storage().data_ptr() not in shared]
    for here, _ in pairs:
        here.zero_()
    problem.subject.synchronize()
    for here, there in pairs:
        here.copy_(there, non_blocking=True)
    problem.call(placed.args, wait=False)
    results = {name: placed.args[name].clone() for name in problem.outputs}
    for here, _ in pairs:
        here.zero_()
    problem.subject.synchronize()
    for name, result in results.items():
        if bool((bits(result.cpu()) != bits(problem.base[name])).any()):
            raise CheckFailed(f"{name}, copied right after the call, is not its result; the call ran out of stream order")


CHECK = Check("stream_order", "Calls are ordered by their stream alone; work that runs aside comes at the wrong time.", run)
