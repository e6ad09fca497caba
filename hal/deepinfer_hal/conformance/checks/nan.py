"""NaN and infinity in one row: its neighbours keep their bits, its result shows it, and its flag says so."""

import torch

from deepinfer_hal import formats
from deepinfer_hal.conformance import rows
from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import PAIRS, assert_same_bits, compare_discrete, compare_values
from deepinfer_hal.conformance.problem import Args, Problem
from deepinfer_hal.conformance.verdict import CheckFailed

CHOOSES = frozenset({"select_topk", "select_candidate_blocks", "sample"})
"""Ops whose cards say what NaN does to a choice."""


def run(problem: Problem, profile: Profile) -> None:
    for value in (float("nan"), float("inf")):
        row, args = _inject(problem, value)
        got, want = problem.run(args).args, problem.reference(args)
        _assert_neighbours(problem, row, got)
        _assert_shown(problem, row, got, want)
        if "cache" in problem.outputs:
            compare_values(problem, args, want, got, problem.written)
            compare_discrete(problem, args, want, got, problem.written)
        if problem.card.name in CHOOSES:
            own = {name: mask.clone() for name, mask in problem.written.items()}
            for mask in own.values():
                mask[:row], mask[row + 1 :] = False, False
            compare_discrete(problem, args, want, got, own)


def _inject(problem: Problem, value: float) -> tuple[int, Args]:
    """The call with one bad value in a row in the middle."""
    name, args = _target(problem), dict(problem.pristine)
    row = problem.valid_rows // 2
    args[name] = args[name].clone()
    flat = args[name][row].reshape(-1)
    flat[flat.shape[0] // 2] = value
    args[name][row] = flat.reshape(args[name][row].shape)
    return row, args


def _assert_neighbours(problem: Problem, row: int, got: Args) -> None:
    """Other rows keep their bits, or their values if the kernel does not promise bits."""
    others = {name: problem.written[name].clone() for name in problem.outputs}
    for name in rows.row_args(problem.card, problem.pristine):
        if name in others:
            others[name][row] = False
    by_row = set(rows.row_args(problem.card, problem.pristine))
    others = {name: mask if name in by_row else torch.zeros_like(mask) for name, mask in others.items()}
    compare_values(problem, problem.pristine, problem.base, got, others)
    for name in rows.row_args(problem.card, problem.pristine):
        if name in problem.outputs:
            others = [i for i in range(problem.num_rows) if i != row]
            if problem.kernel.invariant == "yes":
                why = f"with a bad value in row {row}, another row"
                assert_same_bits(got[name][others], problem.base[name][others], name, why)


def _assert_shown(problem: Problem, row: int, got: Args, want: Args) -> None:
    """Where the reference gives NaN, so does the kernel: never a plausible number. Flags are equal."""
    for name in rows.row_args(problem.card, problem.pristine):
        if name not in problem.outputs:
            continue
        have, wanted = got[name][row], want[name][row]
        scales = PAIRS.get(name)
        if have.dtype == torch.uint8 and name not in problem.card.discrete and got.get(scales) is not None:
            have, wanted = (formats.dequantise(a[name][row : row + 1], a[scales][row : row + 1], "fp8_32") for a in (got, want))
        if have.is_floating_point():
            hidden = wanted.isnan() & have.isfinite()
            if bool(hidden.any()):
                where = hidden.nonzero()[0].tolist()
                raise CheckFailed(f"{name} of row {row} hides a bad value: {have[tuple(where)]} at {where}, must be NaN")
        elif name in ("flags", "scales") and not torch.equal(bits(have), bits(wanted)):
            raise CheckFailed(f"{name} of row {row} is {have.tolist()}, must be {wanted.tolist()}")


def _target(problem: Problem) -> str | None:
    """The first float input with a row per row."""
    kinds = {arg.name: arg.kind for arg in problem.card.signature}
    for name in rows.row_args(problem.card, problem.pristine):
        value = problem.pristine[name]
        if kinds[name] in ("in", "inout") and value.is_floating_point() and value.numel():
            return name
    return None


def applies(problem: Problem) -> bool:
    return problem.valid_rows > 0 and rows.is_row_wise(problem.card, problem.pristine) and _target(problem) is not None


CHECK = Check("nan", "One bad row fails alone, visibly: neighbours keep their bits and a flag or NaN shows it.", run, applies)
