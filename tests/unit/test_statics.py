"""Which calls of an op are of one kind, and which of one form."""

from __future__ import annotations

import pytest
import torch
from deepinfer_hal import late
from deepinfer_hal.card import OpCard, get_card, scalar, tensor
from deepinfer_hal.card import weight as c_weight
from deepinfer_hal.kernel import Kernel, No, Yes
from deepinfer_hal.statics import call_form, call_kind
from deepinfer_hal.weights import CanonicalWeight, WeightHandle


def weight(rows: int) -> WeightHandle:
    return WeightHandle("w", CanonicalWeight("f32", torch.zeros(rows, 8)))


CARD = OpCard("some", "g", "s", (
    tensor("x", "any", "T K"), c_weight("w", "N K"), tensor("count", "i32", "1", optional=True), scalar("n", "int"),
    scalar("eps", "float"), scalar("flag", "bool"), scalar("format", "str"),
), lambda *args: None)  # fmt: skip
CALL = (torch.zeros(4, 8), weight(3), None, 2, 1.5, True, "fp8_32")
form = call_form(CARD)


def changed(place: int, value: object) -> tuple:
    return (*CALL[:place], value, *CALL[place + 1 :])


@pytest.mark.parametrize("other", [changed(3, 7), changed(4, 0.5), changed(0, torch.ones(4, 8)), changed(1, weight(3))])
def test_values_and_numbers_are_not_of_the_form(other):
    assert form(other) == form(CALL)


def test_leading_sizes_are_of_the_form_but_not_of_the_kind():
    other = changed(0, torch.zeros(9, 8))
    assert form(other) != form(CALL) and call_kind(form(other)) == call_kind(form(CALL))


@pytest.mark.parametrize("other", [
    changed(0, torch.zeros(4, 9)), changed(0, torch.zeros(4, 8).to(torch.bfloat16)), changed(0, None), changed(0, torch.zeros(4)),
    changed(1, weight(4)), changed(1, None), changed(2, torch.zeros(1)), changed(5, False), changed(6, "fp4_16"),
])  # fmt: skip
def test_dtypes_widths_formats_flags_and_what_is_given_are_of_the_kind(other):
    assert call_kind(form(other)) != call_kind(form(CALL))


def test_a_weights_leading_size_is_of_the_kind_however_its_handle_says_it():
    few, many = weight(3), weight(4)
    few.shape, many.shape = torch.Size(few.shape), torch.Size(many.shape)
    assert call_kind(form(changed(1, few))) != call_kind(form(changed(1, many)))


def test_a_kernel_is_asked_once_for_calls_that_differ_in_rows_alone():
    asked, made = [], []

    def supports(spec):
        asked.append(spec.statics["h"])
        return Yes() if spec.statics["h"] == 2 else No("two heads")

    two = Kernel("rope", "toy", lambda *args: made.append("two"), "two", supports=supports)
    rest = Kernel("rope", "toy", lambda *args: made.append("rest"), "rest")
    call = late.LateCall(get_card("rope"), [two, rest], False, lambda kernel, refused: None)
    for rows, heads in ((3, 2), (5, 2), (3, 4), (5, 4), (5, 2)):
        call(torch.zeros(rows), torch.zeros(9, 4), False, None, torch.zeros(rows, heads, 8))
    assert made == ["two", "two", "rest", "rest", "two"] and asked == [2, 4]
