"""Runs one case of an op card on a kernel and compares it with the card's reference in float64.

    run_case(get_card("linear"), case)                     the float32 reference itself
    run_case(card, case, kernel, device="cuda", prepare=backend.prepare_weight)

What is checked: the call passes the card's own check; every element the reference writes is within the card's
tolerance, discrete results exactly; every element it leaves alone (poisoned outputs, rows past the count, padding
between rows) keeps its bits; and inputs are not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer_hal import formats
from deepinfer_hal.card import Case, OpCard, all_cards
from deepinfer_hal.checks import check_call
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.ops._common import float64_reference
from deepinfer_hal.weights import prepare_canonical

PAIRS = {"out": "out_scale", "out_codes": "out_scales", "codes": "scales"}
"""Outputs that hold fp8_32 codes when they are uint8, and where their scales are."""

FLIP_SHARE = 0.01
"""Quantised values of a case that may land on the neighbouring code."""


class Mismatch(AssertionError):
    """A kernel's result differs from its card; the message names the case, the output and the worst element."""


@dataclass
class Outcome:
    """What a case showed: per float output the largest difference as a share of what is allowed, and flipped codes."""

    case: str
    used: dict[str, float] = field(default_factory=dict)
    flips: dict[str, int] = field(default_factory=dict)


def cases_of(*names: str) -> list[tuple[OpCard, Case]]:
    """(card, case) of the named ops, for parametrising a test; `case_id` gives the ids."""
    cards = all_cards()
    return [(cards[name], case) for name in names for case in cards[name].enumerate_cases()]


def case_id(value: Any) -> str | None:
    """pytest id of a parameter made by `cases_of`."""
    return value.id if isinstance(value, Case) else value.name if isinstance(value, OpCard) else None


def run_case(
    card: OpCard,
    case: Case,
    kernel: Kernel | Callable[..., None] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    prepare: Callable[..., Any] = prepare_canonical,
) -> Outcome:
    """Runs `kernel` (the card's reference if None) on the case; raises Mismatch, or tells how close it was."""
    args = card.generate(case, seed, device, prepare)
    check_call(card, args)
    before = _snapshot(card.generate(case, seed, "cpu", prepare_canonical))
    expected = card.generate(case, seed, "cpu", prepare_canonical)
    with float64_reference():
        card.reference(*expected.values())
    fn = card.reference if kernel is None else getattr(kernel, "fn", kernel)
    fn(*args.values())
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
    got = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in args.items()}
    outcome = Outcome(case.id)
    _check_untouched(card, case, args, before, expected, got)
    for name in card.outputs():
        if got[name] is not None and name not in PAIRS.values():
            _compare(card, case, name, expected, got, outcome)
    return outcome


def assert_row_independent(card: OpCard, case: Case, kernel: Kernel | Callable[..., None] | None = None) -> None:
    """The bits of the first rows are the same whether or not the rows after them are valid.

    Rows are those of the first tensor; outputs with another first dimension (caches, counts) are left out.
    """
    fn = card.reference if kernel is None else getattr(kernel, "fn", kernel)
    whole = card.generate(case, 0, "cpu", prepare_canonical)
    if whole["count"] is not None:
        return
    first = next(arg for arg in card.signature if arg.is_tensor and whole[arg.name] is not None)
    rows = whole[first.name].shape[0]
    by_row = [a.name for a in card.signature if a.kind in ("out", "inout") and a.dims[0] == first.dims[0]]
    for few in {1, 2, rows // 2, rows - 1} & set(range(1, rows)):
        full, part = (card.generate(case, 0, "cpu", prepare_canonical) for _ in range(2))
        part["count"] = torch.tensor([few], dtype=torch.int32)
        fn(*full.values())
        fn(*part.values())
        for name in by_row:
            if full[name] is not None and not torch.equal(_bits(full[name][:few]), _bits(part[name][:few])):
                raise Mismatch(f"{case.id}: {name} of {few} rows depends on the rows after them")


def _bits(x: torch.Tensor) -> torch.Tensor:
    """x as integers of the same width, so that NaN equals itself and -0 differs from 0."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x if x.dtype == torch.bool else x.contiguous().view(width)


def _storage(x: torch.Tensor) -> torch.Tensor:
    """The buffer that x is a view of, with the gaps between its rows."""
    return x if x._base is None else x._base


def _snapshot(args: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {k: (v.clone(), _storage(v).clone()) for k, v in args.items() if isinstance(v, torch.Tensor)}


def _check_untouched(card: OpCard, case: Case, args: dict, before: dict, expected: dict, got: dict) -> None:
    written = {args[name].data_ptr() for name in card.outputs() if args[name] is not None and args[name].numel()}
    for arg in card.signature:
        if not arg.is_tensor or args[arg.name] is None:
            continue
        name, old = arg.name, before[arg.name][0]
        if arg.kind == "in":
            if args[name].numel() and args[name].data_ptr() not in written and not torch.equal(
                _bits(got[name]), _bits(old)
            ):
                raise Mismatch(f"{case.id}: the kernel wrote its input {name}")
            continue
        kept = _bits(expected[name]) == _bits(old)
        changed = kept & (_bits(got[name]) != _bits(old))
        if arg.kind == "out" and changed.any():
            where = torch.nonzero(changed)[0].tolist()
            raise Mismatch(f"{case.id}: {name}{where} must stay untouched, it became {got[name][tuple(where)]}")
        _check_gaps(case, name, args[name], before[name][1])


def _check_gaps(case: Case, name: str, view: torch.Tensor, old_storage: torch.Tensor) -> None:
    """Bytes of the underlying buffer outside the view keep their value."""
    if view._base is None:
        return
    inside = torch.zeros_like(view._base, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    outside = ~inside.cpu()
    if not torch.equal(_bits(view._base.cpu())[outside], _bits(old_storage)[outside]):
        raise Mismatch(f"{case.id}: the kernel wrote between the rows of {name}")


def _compare(card: OpCard, case: Case, name: str, expected: dict, got: dict, outcome: Outcome) -> None:
    want, have = expected[name], got[name]
    scales = PAIRS.get(name)
    if want.is_floating_point():
        outcome.used[name] = _compare_floats(card, case, name, expected, want, have)
    elif want.dtype == torch.uint8 and name not in card.discrete and got.get(scales) is not None:
        outcome.flips[name] = _compare_codes(case, name, (want, expected[scales]), (have, got[scales]))
    elif want.dtype == torch.uint8 and name not in card.discrete:
        outcome.flips[name] = _count_flips(case, name, want != have, slack=1)
    elif not torch.equal(want, have):
        where = tuple(torch.nonzero(want != have)[0].tolist())
        raise Mismatch(f"{case.id}: {name}{list(where)} is {have[where]}, must be {want[where]}")
    if scales in card.discrete and got.get(scales) is not None and not torch.equal(expected[scales], got[scales]):
        raise Mismatch(f"{case.id}: {scales} differ")


def _compare_floats(card: OpCard, case: Case, name: str, args: dict, want: torch.Tensor, have: torch.Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    allowed = card.tolerance(args, name)
    want, have = want.double(), have.double()
    if not torch.equal(want.isfinite(), have.isfinite()) or not torch.equal(want.isnan(), have.isnan()):
        where = tuple(torch.nonzero((want.isfinite() != have.isfinite()) | (want.isnan() != have.isnan()))[0].tolist())
        raise Mismatch(f"{case.id}: {name}{list(where)} is {have[where]}, must be {want[where]}")
    finite = want.isfinite()
    difference = (have - want).abs().where(finite, 0.0)
    difference = difference.where(finite | (have == want) | want.isnan(), float("inf"))
    limit = allowed.atol + allowed.rtol * want.abs()
    used = (difference / limit.clamp(min=1e-300)).where(difference > 0, 0.0).nan_to_num(0.0, posinf=float("inf"))
    worst = int(used.argmax())
    if used.flatten()[worst] > 1:
        raise Mismatch(
            f"{case.id}: {name} element {worst} is {have.flatten()[worst]:.9g}, must be {want.flatten()[worst]:.9g} "
            f"within {limit.flatten()[worst]:.3g}; {int((used > 1).sum())} of {used.numel()} elements are outside"
        )
    return float(used.max())


def _compare_codes(case: Case, name: str, want: tuple, have: tuple) -> int:
    """Quantised results as values: each within one code step of the other, nearly all of them equal."""
    if want[0].numel() == 0:
        return 0
    exact, value = (formats.dequantise(codes, scales, "fp8_32") for codes, scales in (want, have))
    if not torch.equal(exact.isnan(), value.isnan()):
        raise Mismatch(f"{case.id}: {name} has NaN groups where it must not, or the other way round")
    unit = formats.E8M0_VALUES()[torch.maximum(want[1], have[1]).long()].repeat_interleave(32, -1)
    step = torch.maximum(torch.maximum(exact.abs(), value.abs()) / 8, unit * 2.0**-9)
    difference = (exact - value).abs().nan_to_num(0.0)
    if (difference > step.nan_to_num(float("inf"))).any():
        where = tuple(torch.nonzero(difference > step)[0].tolist())
        raise Mismatch(f"{case.id}: {name}{list(where)} decodes to {value[where]}, must be {exact[where]}")
    return _count_flips(case, name, difference > 0, slack=32)


def _count_flips(case: Case, name: str, differs: torch.Tensor, slack: int) -> int:
    flips = int(differs.sum())
    if flips > max(slack, FLIP_SHARE * differs.numel()):
        raise Mismatch(f"{case.id}: {flips} of {differs.numel()} values of {name} differ, more than {FLIP_SHARE:.0%}")
    return flips
