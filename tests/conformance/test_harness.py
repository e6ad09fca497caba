"""The harness tells a right kernel from wrong ones."""

import pytest
import torch
from deepinfer_hal.card import Case, get_card

from tests.conformance.harness import Mismatch, assert_row_independent, run_case

LINEAR = get_card("linear")
STRIDED = Case("linear", dict(T=5, K=64, N=32, x="bf16", w="bf16", out="f32", strided=True))
COUNTED = Case("linear", dict(T=5, K=64, N=32, x="bf16", w="bf16", out="bf16", count=3))
CODED = Case("linear", dict(T=5, K=64, N=64, x="u8", w="fp8_block32", out="u8"))


def after(case, change):
    """The reference followed by `change(args)`, as a kernel for `case`."""

    def kernel(*values):
        args = LINEAR.bind_args(values, {})
        LINEAR.reference(*values)
        change(args)

    return run_case(LINEAR, case, kernel)


def test_the_reference_passes_and_uses_little_of_its_tolerance():
    assert run_case(LINEAR, STRIDED).used["out"] < 0.5


def test_a_small_error_is_caught():
    with pytest.raises(Mismatch, match=r"out\[2, 3\] is"):
        after(STRIDED, lambda a: a["out"][2, 3].add_(1e-4))


def test_a_write_past_the_count_is_caught():
    with pytest.raises(Mismatch, match="must stay untouched"):
        after(COUNTED, lambda a: a["out"][3].fill_(0))


def test_a_row_left_out_is_caught():
    with pytest.raises(Mismatch, match="nan"):
        after(COUNTED, lambda a: a["out"][2].fill_(float("nan")))


def test_a_write_between_the_rows_is_caught():
    with pytest.raises(Mismatch, match="between the rows of out"):
        after(STRIDED, lambda a: a["out"].as_strided((1,), (1,), a["out"].storage_offset() + 40).fill_(1))


def test_a_write_to_an_input_is_caught():
    with pytest.raises(Mismatch, match="wrote its input x"):
        after(COUNTED, lambda a: a["x"][4, 0].fill_(9))


def test_a_code_two_steps_off_is_caught():
    with pytest.raises(Mismatch, match="decodes to"):
        after(CODED, lambda a: a["out"][0, 0].add_(2))


def test_too_many_codes_one_step_off_are_caught():
    def nudge(args):
        codes = args["out"]
        codes += ((codes & 0x7F) < 0x78).to(torch.uint8)

    with pytest.raises(Mismatch, match="on the next code, more than 1%"):
        after(CODED, nudge)


def test_dependence_on_later_rows_is_caught():
    card = get_card("rms_norm")
    case = Case("rms_norm", dict(T=4, N=64, x="f32", out="f32", w="f32"))

    def kernel(x, weight, eps, count, out, *rest):
        card.reference(x, weight, eps, count, out, *rest)
        rows = x.shape[0] if count is None else int(count[0])
        out[:rows] *= 1 + rows * 1e-6

    assert_row_independent(card, case)
    with pytest.raises(Mismatch, match="without the rows after"):
        assert_row_independent(card, case, kernel)
