"""Arguments that a kernel takes to be without gaps are refused where they have some, before it writes to wrong places."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda.dense import DENSE, checked
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import Unsupported


def quantise_call(**changes):
    """Arguments of quantise for four rows of 64, and what a call that is not refused leaves in `called`."""
    given = {
        "x": torch.zeros(4, 64, dtype=torch.bfloat16), "format": "fp8_32", "count": None,
        "codes": torch.zeros(4, 64, dtype=torch.uint8), "scales": torch.zeros(4, 2, dtype=torch.uint8), "flags": None,
    }  # fmt: skip
    called = []
    checked("quantise", lambda *args: called.append(args))(*{**given, **changes}.values())
    return called


def test_rows_without_gaps_are_passed_on():
    (args,) = quantise_call()
    assert len(args) == 6
    assert quantise_call(codes=torch.zeros(8, 64, dtype=torch.uint8)[2:6])
    assert quantise_call(x=torch.zeros(4, 96, dtype=torch.bfloat16)[:, :64])  # whose stride the kernel reads
    one_row = torch.zeros(1, 128, dtype=torch.uint8)[:, :64]
    assert quantise_call(x=torch.zeros(1, 64), codes=one_row, scales=torch.zeros(1, 2, dtype=torch.uint8))


@pytest.mark.parametrize(("name", "width"), [("codes", 64), ("scales", 2)])
def test_outputs_with_gaps_are_refused(name, width):
    with pytest.raises(Unsupported, match=rf"quantise: the rows of {name} must follow one another; \[4, {width}\] with strides"):
        quantise_call(**{name: torch.zeros(4, width + 8, dtype=torch.uint8)[:, :width]})


def test_codes_that_begin_where_eight_bytes_cannot_be_stored_are_refused():
    room = torch.zeros(4 * 64 + 16, dtype=torch.uint8)
    shift = -room.data_ptr() % 8 + 3
    with pytest.raises(Unsupported, match="quantise: codes must begin at a multiple of 8 bytes"):
        quantise_call(codes=room[shift : shift + 256].view(4, 64))


def test_the_table_names_arguments_of_its_cards():
    for op, wanted in DENSE.items():
        assert wanted.keys() <= {arg.name for arg in get_card(op).signature if arg.is_tensor}, op


def test_an_op_whose_kernel_looks_at_all_strides_is_called_as_it_is():
    def fn(*args):
        return None

    assert checked("linear", fn) is fn
