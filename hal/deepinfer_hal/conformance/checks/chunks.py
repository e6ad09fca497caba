"""Chunk edges: a request's tokens in two calls give the groups that one call gives, for the op that carries state."""

from collections.abc import Iterator
from typing import Any

import torch

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import assert_same_bits
from deepinfer_hal.conformance.problem import Args, Problem


def run(problem: Problem, profile: Profile) -> None:
    for first_tokens in (1, 2, 5):
        outputs: dict[int, torch.Tensor] = {}
        carry = problem.pristine["carry"]
        for args, groups in _parts(problem.pristine, first_tokens):
            got = problem.run({**args, "carry": carry}).args
            carry = got["carry"]
            outputs |= {group: got["out"][i] for i, group in enumerate(groups)}
        for group, row in outputs.items():
            assert_same_bits(row, problem.base["out"][group], "out", f"group {group} with chunks of {first_tokens} and the rest")
        assert_same_bits(carry, problem.base["carry"], "carry", f"after chunks of {first_tokens} and the rest")


def _parts(args: Args, first_tokens: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """The first tokens of every request, then the others: (call, the groups of the whole call that it completes)."""
    cu_q, complete = args["cu_q"].tolist(), args["complete"].tolist()
    for part in (0, 1):
        taken, bounds = [], [0]
        for start, end in zip(cu_q, cu_q[1:], strict=False):
            cut = min(start + first_tokens, end)
            taken += range(start, cut) if part == 0 else range(cut, end)
            bounds.append(len(taken))
        place = {token: i for i, token in enumerate(taken)}
        groups = [g for g, token in enumerate(complete) if token in place]
        call = {name: args[name][taken].clone() for name in ("value", "gate", "positions", "row_to_req")}
        call["cu_q"] = torch.tensor(bounds, dtype=torch.int32)
        call["complete"] = torch.tensor([place[complete[g]] for g in groups], dtype=torch.int32)
        call["out"] = args["out"][groups].clone()
        yield {**args, **call}, groups


def applies(problem: Problem) -> bool:
    named = problem.card.name == "compress_kv" and problem.kernel.invariant == "yes"
    if not named or problem.pristine["cu_q"].numel() < 2:
        return False
    end = int(problem.pristine["cu_q"][-1])
    return end > 0 and end == problem.pristine["value"].shape[0]


CHECK = Check("chunks", "Where a prompt is cut into chunks must not change a bit of what is compressed.", run, applies)
