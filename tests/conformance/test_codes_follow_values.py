"""Codes beside the rounded values they are made from: those values may round either way, the codes may not choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepinfer_hal import formats
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.conformance import CHECKS, run_op
from deepinfer_hal.kernel import Kernel

CASES = {
    "rms_norm": dict(T=33, N=256, x="bf16", out="bf16", codes=True),
    "residual_site": dict(T=5, m=4, H=256, dtype="bf16", codes=True),
}


def judged(op: str, change: Callable[[dict[str, Any]], None]) -> str:
    """What the check `values` says of a kernel that computes as the reference does, then changes its outputs."""
    card = get_card(op)

    def kernel(*values: Any) -> None:
        card.reference(*values)
        change(dict(zip(card.arg_names, values, strict=True)))

    broken = Kernel(op, "test", kernel, f"reference::{op}+changed")
    result = run_op(card, broken, checks=CHECKS.only("values"), cases=[Case(op, CASES[op])])[0]
    return result.failures.get("values", "")


def round_the_other_way(args: dict[str, Any]) -> None:
    """One value of `out` on the next BF16 number, and its codes made anew."""
    bits = args["out"].view(torch.int16)
    bits[0, 7] += 1
    remake_codes(args)


def remake_codes(args: dict[str, Any]) -> None:
    codes, scales = formats.quantise(args["out"], "fp8_32")
    args["out_codes"].copy_(codes)
    args["out_scales"].copy_(scales)


def value_without_codes(args: dict[str, Any]) -> None:
    """A value moves to the next code, its code stays: within one step of the reference, and still wrong."""
    before = args["out_codes"].clone()
    round_the_other_way(args)
    for column in range(args["out"].shape[1]):
        args["out"].view(torch.int16)[1, column] += 1
    remake_codes(args)
    assert not torch.equal(before, args["out_codes"]), "no value crossed a boundary: the case shows nothing"
    args["out_codes"].copy_(before)


@pytest.mark.parametrize("op", CASES)
def test_a_value_that_rounds_the_other_way_takes_its_codes_with_it(op):
    assert judged(op, round_the_other_way) == ""


@pytest.mark.parametrize("op", CASES)
def test_codes_that_are_not_those_of_the_values_fail(op):
    assert "which `out` is quantised to" in judged(op, value_without_codes)


def test_codes_of_a_site_may_be_off_by_what_its_values_may_be_off():
    card = get_card("residual_site")
    args = card.generate(Case("residual_site", CASES["residual_site"]), 0, "cpu", None)
    assert card.tolerance(args, "out_codes") == card.tolerance(args, "out")
    assert card.tolerance(args, "pre") != card.tolerance(args, "out")
