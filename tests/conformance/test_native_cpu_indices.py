"""What the CPU backend's native kernels do with an index that points past its table: nothing beyond the table is read or
written, the row is left out as one of index -1 is, and all other rows are as they would be without it."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cpu import kernels
from deepinfer_cpu.weights import prepare_weight
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.weights import CanonicalWeight

pytestmark = pytest.mark.skipif(kernels.native() is None, reason=f"native kernels: {kernels.native_unavailable_reason()}")

LAST = 2**31 - 1
JUST_OUTSIDE_AND_FAR = [0, LAST]
"""Added to a table's length: the first row behind it, where another tensor may lie, and one in no memory of the process."""


def within(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The first rows of a longer tensor, which goes on with what no result may hold."""
    whole = torch.full((rows + 4, *shape), 77, dtype=dtype)
    whole[:rows] = torch.arange(rows).reshape(-1, *[1] * len(shape)) + 1
    return whole[:rows]


def behind(table: torch.Tensor) -> torch.Tensor:
    """The rows after those that `within` gave."""
    return table.as_strided((4, *table.shape[1:]), table.stride(), table.shape[0] * table.stride(0))


def indices(*values: int) -> torch.Tensor:
    return torch.tensor([min(value, LAST) for value in values], dtype=torch.int32)


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
def test_a_token_outside_the_embedding_gives_zeros(beyond):
    table = prepare_weight("embedding", CanonicalWeight("f32", within(5, 16)))
    out = torch.full((3, 2, 16), -7.0)
    kernels.bind(get_card("embedding_gather"))(indices(4, 5 + beyond, 0), table, None, out)
    assert [row.unique().tolist() for row in out] == [[5.0], [0.0], [1.0]]


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
@pytest.mark.parametrize("what", ["slots", "row_to_req", "positions"])
def test_gather_tokens_leaves_a_row_that_points_outside_the_history(what, beyond):
    history = within(4, 8, dtype=torch.int32)
    given = {"slots": [3, 1, 2], "row_to_req": [0, 1, 2], "positions": [2, 7, 0]}
    given[what][1] = {"slots": 4, "row_to_req": 3, "positions": 8}[what] + beyond
    ids, ngrams = torch.full((3,), -7, dtype=torch.int32), torch.full((3, 2), -7, dtype=torch.int32)
    kernels.bind(get_card("gather_tokens"))(history, *(indices(*given[name]) for name in given), None, ids, ngrams)
    assert ids.tolist() == [4, -7, 3] and ngrams.tolist() == [[4, 4], [-7, -7], [3, -1]]


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
@pytest.mark.parametrize("what", ["slots", "positions"])
def test_advance_step_writes_nothing_outside_the_history(what, beyond):
    history = within(4, 8, dtype=torch.int32)
    given = {"slots": [3, 1], "positions": [2, 7]}
    given[what][1] = {"slots": 4, "positions": 8}[what] + beyond
    before = history.clone()
    before[3, 2] = 50
    kernels.bind(get_card("advance_step"))(indices(50, 60), indices(*given["slots"]), indices(*given["positions"]), history)
    assert torch.equal(history, before) and (behind(history) == 77).all()


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
def test_copy_rows_copies_nothing_from_or_to_outside(beyond):
    source, target = within(4, 32, dtype=torch.uint8), within(3, 32, dtype=torch.uint8)
    kernels.bind(get_card("copy_rows"))(source, indices(3, 4 + beyond, 2), indices(0, 1, 3 + beyond), target)
    assert target[:, 0].tolist() == [4, 2, 3] and (behind(target) == 77).all()


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
@pytest.mark.parametrize("op", ["copy_blocks", "snapshot_state"])
def test_pairs_of_blocks_that_are_not_there_are_left_out(op, beyond):
    cache = within(4, 32, dtype=torch.uint8)
    kernels.bind(get_card(op))(indices(3, 4 + beyond, 2), indices(0, 1, 4 + beyond), cache)
    assert cache[:, 0].tolist() == [4, 2, 3, 4] and (behind(cache) == 77).all()


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
@pytest.mark.parametrize("block_rows", [0, 2])
def test_load_kv_leaves_a_row_whose_slot_is_not_in_the_cache(block_rows, beyond):
    cache = within(3, 16 * 4 * max(block_rows, 1), dtype=torch.uint8)  # rows of 16 float32
    cache.view(torch.float32).copy_(torch.arange(3.0)[:, None])
    out = torch.full((3, 16), -7.0)
    slots = 3 * max(block_rows, 1)
    kernels.bind(get_card("load_kv"))(cache, indices(slots - 1, slots + beyond, 0), "f32", block_rows, out)
    assert [row.unique().tolist() for row in out] == [[2.0], [-7.0], [0.0]]


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
def test_unpermute_adds_no_row_that_is_not_there(beyond):
    rows, out = within(4, 16), torch.full((2, 16), -7.0)
    inverse = indices(3, 4 + beyond, 1, 0).reshape(2, 2)
    kernels.bind(get_card("unpermute"))(rows, inverse, None, None, out)
    assert [row.unique().tolist() for row in out] == [[4.0], [3.0]]


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
def test_rope_turns_no_row_past_the_end_of_its_table(beyond):
    x = torch.ones(2, 1, 16)
    kernels.bind(get_card("rope"))(indices(1, 2 + beyond), within(2, 8), False, None, x)
    assert not torch.equal(x[0], torch.ones(1, 16)) and torch.equal(x[1], torch.ones(1, 16))


ATTENTION = Case("sparse_attention", dict(
    requests="0+3,127+1,300+6", heads=4, D=512, k=64, block_rows=64, dtype="bf16", window="fp8_32", compressed="fp4_16",
    storage="ring",
))  # fmt: skip


@pytest.mark.parametrize("far", [False, True])
def test_a_selected_row_beyond_the_block_table_is_no_key(far):
    card, fn = get_card("sparse_attention"), kernels.bind(get_card("sparse_attention"))
    args = card.generate(ATTENTION, 0, "cpu", prepare_weight)
    fewer = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in args.items()}
    table = args["block_table"]
    row = 9  # of the last request
    count = int((args["rows"][row] >= 0).sum())
    args["rows"][row, count - 1] = LAST if far else table.shape[1] * 64
    fewer["rows"][row, count - 1] = -1
    fn(*args.values())
    fn(*fewer.values())
    assert torch.equal(args["out"].view(torch.uint8), fewer["out"].view(torch.uint8))


@pytest.mark.parametrize("beyond", JUST_OUTSIDE_AND_FAR)
def test_a_row_of_a_request_that_is_not_there_is_left_untouched(beyond):
    card = get_card("sparse_attention")
    args = card.generate(ATTENTION, 0, "cpu", prepare_weight)
    expected = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in args.items()}
    args["row_to_req"][1] = indices(3 + beyond)
    expected["row_to_req"][1] = -1
    for each in (args, expected):
        kernels.bind(card)(*each.values())
    assert torch.equal(args["out"].view(torch.uint8), expected["out"].view(torch.uint8))
