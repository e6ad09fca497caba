"""Results against the float64 reference: floats by the card's tolerance, codes by value, integers exactly.

Only elements that the op writes are compared; the others are the business of the checks `untouched` and `sentinels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal import formats, row_layout
from deepinfer_hal.card import Tolerance
from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed

PAIRS = {"out": "out_scale", "out_codes": "out_scales", "codes": "scales"}
"""Outputs that hold fp8_32 codes when they are uint8, and where their scales are."""

FLIP_SHARE = 0.01
"""Share of a case's quantised values that may land on the neighbouring code, and of its discrete decisions that may
fall the other way at their boundary."""

FLIP_SLACK = 32
"""Quantised values that may do so in a case of any size: one group, whose scale sat on a power of two."""

BIN_EDGES = tuple(2.0**-n for n in range(7, -1, -1))
"""Upper edges of the error histogram, as shares of what is allowed: exact, up to 2^-7, ..., up to 1, more."""

Args = Mapping[str, Any]


def compare_values(problem: Problem, args: Args, expected: Args, got: Args, written: Args | None = None) -> None:
    """Every output that is no discrete one. Raises CheckFailed; adds to the problem's statistics.

    written: output -> bool mask of what to compare; None compares everything.
    """
    card = problem.card
    excused = _excused_rows(problem, args, expected, got, written)
    for name in problem.outputs:
        if name in card.discrete or name in _scales_of(card, got):
            continue
        mask = _mask(expected[name], None if written is None else written[name], excused)
        stored = _stored_rows(name, expected, got, mask)
        if expected[name].is_floating_point():
            _compare_floats(problem, name, expected, got, mask)
        elif stored is not None:
            _compare_stored(problem, name, stored)
        elif got.get(PAIRS.get(name, "")) is not None:
            _compare_codes(problem, name, PAIRS[name], expected, got, mask)
        else:
            _compare_exactly(name, expected[name], got[name], mask)


def compare_discrete(problem: Problem, args: Args, expected: Args, got: Args, written: Args | None = None) -> None:
    """Discrete outputs: equal, or different only where the decision is at its boundary, counted, at most 1 %."""
    from deepinfer_hal.conformance.boundaries import near_rows

    card = problem.card
    for name in problem.outputs:
        if name not in card.discrete:
            continue
        mask = _mask(expected[name], None if written is None else written[name], None)
        wrong = mask & (bits(expected[name]) != bits(got[name]))
        if not bool(wrong.any()):
            continue
        near = near_rows(problem, args, expected, name)
        if near is None or bool((wrong & ~_spread(near, wrong)).any()):
            where = (wrong if near is None else wrong & ~_spread(near, wrong)).nonzero()[0].tolist()
            raise CheckFailed(_differs(name, where, got[name], expected[name]))
        hits, decisions = int(wrong.sum()), max(int(mask.sum()), 1)
        problem.statistics["boundary_hits"][name] = hits
        if hits > max(1, FLIP_SHARE * decisions):
            raise CheckFailed(f"{name}: {hits} of {decisions} decisions fell the other way at their boundary, more than 1 %")


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, name: str, why: str) -> None:
    """CheckFailed, with the first place, unless the bits are equal."""
    if got.shape != want.shape or not torch.equal(bits(got), bits(want)):
        where = (bits(got) != bits(want)).nonzero()[0].tolist()
        raise CheckFailed(f"{why}: {_differs(name, where, got, want)}")


# ---------------------------------------------------------------------------------------------------- helpers


def _differs(name: str, where: list[int], got: torch.Tensor, want: torch.Tensor) -> str:
    return f"{name}{where} is {got[tuple(where)].item()}, must be {want[tuple(where)].item()}"


def _spread(by_row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask of leading rows over a whole output."""
    return by_row.reshape(-1, *[1] * (like.dim() - 1)).expand(like.shape)


def _mask(want: torch.Tensor, written: torch.Tensor | None, excused: torch.Tensor | None) -> torch.Tensor:
    mask = torch.ones(want.shape, dtype=torch.bool) if written is None else written
    if excused is not None and want.dim() and want.shape[0] == excused.shape[0]:
        mask = mask & ~_spread(excused, want)
    return mask


def _excused_rows(problem: Problem, args: Args, expected: Args, got: Args, written: Args | None) -> torch.Tensor | None:
    """Rows whose discrete outputs differ at a boundary: their other outputs follow another decision."""
    from deepinfer_hal.conformance.boundaries import near_rows

    found = None
    total = problem.num_rows
    for name in problem.outputs:
        if name not in problem.card.discrete or expected[name].shape[:1] != (total,):
            continue
        wrong = _mask(expected[name], None if written is None else written[name], None)
        wrong = (wrong & (bits(expected[name]) != bits(got[name]))).reshape(total, -1).any(1)
        if bool(wrong.any()):
            near = near_rows(problem, args, expected, name)
            if near is not None:
                found = (wrong & near) if found is None else found | (wrong & near)
    return found


def _scales_of(card: Any, got: Args) -> set[str]:
    """Outputs that are compared together with their codes."""
    return {scales for codes, scales in PAIRS.items() if got.get(codes) is not None and codes not in card.discrete}


_STORES = {"cache": ("slots", "format"), "window": ("window_slots", "window_format")}
"""Stores that ops write rows into: the argument with the slots, and the one with the row format."""


def _stored_rows(name: str, expected: Args, got: Args, mask: torch.Tensor) -> Any:
    """(format, (codes, scales) expected, (codes, scales) got) of the rows that a store op wrote; None for other outputs."""
    slots, format = _STORES.get(name, ("", ""))
    if slots not in expected:
        return None
    written = torch.unique(expected[slots][expected[slots] >= 0])
    width = (expected["kv_norm"] if "kv_norm" in expected else expected["x"]).shape[-1]
    block_rows = expected.get("block_rows", 0) if name == "cache" else 0
    stores = (expected[name], got[name], mask.to(torch.uint8))
    want, have, marks = (row_layout.read_codes(s, written, expected[format], width, block_rows) for s in stores)
    keep = (marks[0] != 0).any(-1)
    return expected[format], tuple(part[keep] for part in want), tuple(part[keep] for part in have)


def _compare_floats(problem: Problem, name: str, expected: Args, got: Args, mask: torch.Tensor) -> None:
    if not bool(mask.any()):
        return
    allowed = problem.card.tolerance(expected, name)
    want, have = expected[name].double()[mask], got[name].double()[mask]
    places = mask.nonzero()
    _same_kind(name, want, have, places)
    finite = want.isfinite()
    difference = (have - want).abs().where(finite, 0.0)
    difference = difference.where(finite | (have == want) | want.isnan(), float("inf"))
    limit = allowed.atol + allowed.rtol * want.abs()
    used = (difference / limit.clamp(min=1e-300)).where(difference > 0, 0.0).nan_to_num(0.0, posinf=float("inf"))
    _record(problem, name, used)
    worst = int(used.argmax())
    if used[worst] > 1:
        raise CheckFailed(
            f"{name}{places[worst].tolist()} is {have[worst]:.9g}, must be {want[worst]:.9g} within {limit[worst]:.3g}; "
            f"{int((used > 1).sum())} of {used.numel()} values are outside"
        )


def _same_kind(name: str, want: torch.Tensor, have: torch.Tensor, places: torch.Tensor) -> None:
    odd = (want.isnan() != have.isnan()) | (want.isfinite() != have.isfinite())
    if bool(odd.any()):
        at = int(odd.nonzero()[0])
        raise CheckFailed(f"{name}{places[at].tolist()} is {have[at]:.9g}, must be {want[at]:.9g}")


def _record(problem: Problem, name: str, used: torch.Tensor) -> None:
    """Keeps the largest error and the histogram of an output, over all runs of the case."""
    edges = torch.tensor((0.0, *BIN_EDGES), dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(used, edges), minlength=len(edges) + 1).tolist()
    kept = problem.statistics
    kept["used"][name] = max(kept["used"].get(name, 0.0), float(used.max()))
    before = kept["histogram"].get(name, [0] * len(counts))
    kept["histogram"][name] = [a + b for a, b in zip(before, counts, strict=True)]


def _compare_stored(problem: Problem, name: str, stored: Any) -> None:
    format, want, have = stored
    if want[0].numel() == 0:
        return
    if format in row_layout.DENSE:
        expected, got = ({name: row_layout.decode_rows(*pair, format)} for pair in (want, have))
        args = {**problem.pristine, name: expected[name]}
        _compare_floats(problem, name, args, got, torch.ones(expected[name].shape, dtype=torch.bool))
        return
    keep = torch.ones(want[1].shape[0], dtype=torch.bool)
    compare_coded(problem, name, format, want, have, keep, problem.card.tolerance(problem.expected, name))


def _compare_codes(problem: Problem, name: str, scales: str, expected: Args, got: Args, mask: torch.Tensor) -> None:
    whole = mask.any(-1)
    _follow_values(name, scales, got, whole)
    pairs = ((expected[name], expected[scales]), (got[name], got[scales]))
    compare_coded(problem, name, "fp8_32", *pairs, whole, problem.card.tolerance(expected, name))


def _follow_values(name: str, scales: str, got: Args, whole: torch.Tensor) -> None:
    """Codes that come beside the rounded values they are made from are exactly theirs, whichever way those rounded."""
    values = got.get("out") if name == "out_codes" else None
    if values is None or not bool(whole.any()):
        return
    want = formats.dequantise(*formats.quantise(values[whole], "fp8_32"), "fp8_32")
    have = formats.dequantise(got[name][whole], got[scales][whole], "fp8_32")
    wrong = (want != have) & ~(want.isnan() & have.isnan())
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        at = f"{name}[{int(whole.nonzero()[row, 0])}, {column}]"
        raise CheckFailed(f"{at} decodes to {have[row, column]}, must be {want[row, column]}, which `out` is quantised to")


def compare_coded(
    problem: Problem, name: str, format: str, want: tuple, have: tuple, keep: torch.Tensor, allowed: Tolerance
) -> None:
    """Quantised rows as values: each within one code step and the card's tolerance of the other, nearly all of them equal."""
    if not bool(keep.any()):
        return
    want, have = (tuple(part[keep] for part in pair) for pair in (want, have))
    exact, value = (formats.dequantise(codes, scales, format) for codes, scales in (want, have))
    if not torch.equal(exact.isnan(), value.isnan()):
        where = (exact.isnan() != value.isnan()).nonzero()[0].tolist()
        raise CheckFailed(f"{name}{where} decodes to {value[tuple(where)]}, must be {exact[tuple(where)]}")
    group = formats.GROUP_SIZE[format]
    table = formats.E4M3_VALUES() if format == "fp4_16" else formats.E8M0_VALUES()
    unit = torch.maximum(table[want[1].long()], table[have[1].long()]).repeat_interleave(group, -1)
    relative, least = (1 / 8, 2.0**-9) if format == "fp8_32" else (1 / 3, 0.5)
    step = torch.maximum(torch.maximum(exact.abs(), value.abs()) * relative, unit * least)
    difference = (exact - value).abs().nan_to_num(0.0)
    far = difference > step.nan_to_num(float("inf")) + allowed.atol + allowed.rtol * exact.abs().nan_to_num(0.0)
    if bool(far.any()):
        where = far.nonzero()[0].tolist()
        raise CheckFailed(f"{name}{where} decodes to {value[tuple(where)]}, must be {exact[tuple(where)]}")
    flips = int((difference > 0).sum())
    problem.statistics["flips"][name] = max(flips, problem.statistics["flips"].get(name, 0))
    if flips > max(FLIP_SLACK, FLIP_SHARE * difference.numel()):
        raise CheckFailed(f"{flips} of {difference.numel()} values of {name} are on the next code, more than {FLIP_SHARE:.0%}")


def _compare_exactly(name: str, want: torch.Tensor, have: torch.Tensor, mask: torch.Tensor) -> None:
    wrong = mask & (bits(want) != bits(have))
    if bool(wrong.any()):
        raise CheckFailed(_differs(name, wrong.nonzero()[0].tolist(), have, want))
