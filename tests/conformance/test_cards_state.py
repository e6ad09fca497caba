"""Cards of the step and of state: token history, copies of rows, blocks and state slots, against plain loops."""

import pytest
import torch
from cache_cards import count_rows, is_poison, make, run
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops.advance_step import advance_step
from deepinfer_hal.ops.copy_rows import copy_rows
from deepinfer_hal.ops.gather_tokens import gather_tokens
from harness import case_id, cases_of, run_case

NAMES = ("advance_step", "gather_tokens", "copy_rows", "copy_blocks", "snapshot_state")


@pytest.mark.parametrize("card, case", cases_of(*NAMES), ids=case_id)
def test_outputs_are_exact_and_nothing_else_is_written(card, case):
    run_case(card, case)


@pytest.mark.parametrize("card, case", cases_of("advance_step"), ids=case_id)
def test_advance_step_writes_each_token_at_its_place_only(card, case):
    args = run(case)
    expected = make(case)["history"]
    for token, slot, position in zip(*(args[n].tolist() for n in ("tokens", "slots", "positions")), strict=True):
        if min(token, slot, position) >= 0:
            expected[slot, position] = token
    assert torch.equal(args["history"], expected)


@pytest.mark.parametrize("card, case", cases_of("gather_tokens"), ids=case_id)
def test_gather_tokens_reads_ids_and_ngrams_back_to_the_start(card, case):
    args = run(case)
    for t in range(args["ids"].shape[0]):
        r, p = int(args["row_to_req"][t]), int(args["positions"][t])
        if t >= count_rows(args, args["ids"].shape[0]) or r < 0 or p < 0:
            assert is_poison(args["ids"][t]) and (args["ngrams"] is None or is_poison(args["ngrams"][t]))
            continue
        history = args["history"][int(args["slots"][r])].tolist()
        assert int(args["ids"][t]) == history[p]
        if args["ngrams"] is not None:
            width = args["ngrams"].shape[1]
            assert args["ngrams"][t].tolist() == [history[p - n] if p >= n else -1 for n in range(width)]


def test_tokens_appended_by_one_step_are_the_ids_and_ngrams_of_the_next():
    i32 = {"dtype": torch.int32}
    history = torch.full((3, 16), -7, **i32)
    history[2, :3] = torch.tensor([5, 6, 7], **i32)
    slots = torch.tensor([2], **i32)
    advance_step(torch.tensor([9], **i32), slots, torch.tensor([3], **i32), history)
    ids, ngrams = torch.zeros(1, **i32), torch.zeros(1, 4, **i32)
    row_to_req, positions = torch.zeros(1, **i32), torch.tensor([3], **i32)
    gather_tokens(history, slots, row_to_req, positions, None, ids, ngrams)
    assert ids.tolist() == [9] and ngrams.tolist() == [[9, 7, 6, 5]]


def test_a_row_of_a_request_without_a_slot_is_left_untouched():
    i32 = {"dtype": torch.int32}
    ids = torch.full((2,), -5, **i32)
    gather_tokens(
        torch.ones(2, 4, **i32), torch.tensor([-1, 1], **i32), torch.tensor([0, 1], **i32), torch.tensor([0, 0], **i32),
        None, ids, None,
    )  # fmt: skip
    assert ids.tolist() == [-5, 1]


@pytest.mark.parametrize("card, case", cases_of("copy_rows"), ids=case_id)
def test_copy_rows_copies_the_named_rows_only(card, case):
    args = run(case)
    expected = make(case)["dst"]
    for source, target in zip(args["src_rows"].tolist(), args["dst_rows"].tolist(), strict=True):
        if source >= 0 and target >= 0:
            expected[target] = args["src"][source]
    assert torch.equal(args["dst"], expected)


def test_copy_rows_within_one_store():
    store = torch.arange(12, dtype=torch.uint8).reshape(4, 3)
    rows = torch.tensor([0, 1], dtype=torch.int32)
    copy_rows(store, rows, rows + 2, store)
    assert store.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_copy_rows_between_rows_of_different_size_is_refused():
    card, case = cases_of("copy_rows")[1]
    args = make(case)
    with pytest.raises(BadCall, match="must have one size, got 528 and 500 bytes"):
        check_call(card, {**args, "dst": args["dst"][:, :500]})


@pytest.mark.parametrize("card, case", cases_of("copy_blocks", "snapshot_state"), ids=case_id)
def test_blocks_and_state_slots_are_copied_whole(card, case):
    args = run(case)
    name = card.outputs()[0]
    before = make(case)[name]
    expected = before.clone()
    for source, target in zip(args["src"].tolist(), args["dst"].tolist(), strict=True):
        if source >= 0 and target >= 0:
            expected[target] = before[source]
    assert torch.equal(args[name], expected)
