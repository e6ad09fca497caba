"""The bytes and FLOPs of a card are a floor: never more than touching every argument once, never less than the outputs."""

from __future__ import annotations

import pytest
import torch
from deepinfer_hal.card import Case, all_cards, default_cost
from deepinfer_hal.weights import prepare_canonical

SEED = 5
CPU = torch.device("cpu")


def arguments(card):
    for case in card.enumerate_cases():
        yield card.generate(case, SEED, CPU, prepare_canonical)


def rows_read_and_written(card, args) -> int:
    return sum(args[arg.name].nbytes for arg in card.signature if arg.kind == "out" and args[arg.name] is not None)


@pytest.mark.parametrize("name", sorted(all_cards()))
def test_a_cost_lies_between_the_outputs_and_twice_all_arguments(name):
    card = all_cards()[name]
    for args in arguments(card):
        cost = card.cost(args)
        assert rows_read_and_written(card, args) <= cost.bytes <= 2 * default_cost(args).bytes
        assert cost.flops >= 0


@pytest.mark.parametrize(("op", "store"), [("write_kv", "cache"), ("gather_tokens", "history"), ("rope", "table")])
def test_the_size_of_a_store_does_not_count_only_what_a_call_touches(op, store):
    card = all_cards()[op]
    args = next(args for args in arguments(card) if args["positions"].numel())
    larger = {**args, store: torch.cat([args[store]] * 3)}
    assert card.cost(larger) == card.cost(args)


def test_a_rotation_moves_the_rotated_dims_alone():
    card = all_cards()["rope"]
    narrow, wide = (
        card.generate(Case("rope", dict(T=3, h=4, D=width, r=64, dtype="bf16", inverse=False)), SEED, CPU, None)
        for width in (64, 512)
    )
    assert card.cost(narrow) == card.cost(wide) and card.cost(wide).bytes > 2 * narrow["x"].nbytes


def test_a_step_of_one_token_does_not_touch_its_whole_carry_ring():
    card = all_cards()["compress_kv"]
    steps = {
        requests: card.generate(Case("compress_kv", dict(requests=requests, ratio=2, L=7, D=64, dtype="f32")), SEED, CPU, None)
        for requests in ("6+1", "7+1", "6+2")
    }
    token = 2 * 64 * 4
    longer = {**steps["7+1"], "carry": torch.cat([steps["7+1"]["carry"]] * 3, dim=1)}
    assert card.cost(longer) == card.cost(steps["7+1"])
    carried = {
        requests: card.cost(args).bytes - card.cost({**args, "state_slots": torch.full_like(args["state_slots"], -1)}).bytes
        for requests, args in steps.items()
    }
    assert carried == {"6+1": token, "7+1": 2 * token, "6+2": 2 * token}, "stored, and read where a group ends"


def test_rows_without_penalties_biases_or_mask_cost_no_logits():
    card = all_cards()["mask_logits"]
    none, some, masked = (
        card.generate(Case("mask_logits", dict(S=5, V=2048, L=64, mode=mode)), SEED, CPU, None)
        for mode in ("off", "penalties", "all")
    )
    assert card.cost(none).bytes < 4 * 16 * 5
    assert card.cost(none).bytes < card.cost(some).bytes < card.cost(masked).bytes < none["logits"].nbytes


def test_experts_without_rows_are_not_read():
    card = all_cards()["grouped_gemm"]
    args = next(args for args in arguments(card) if args["x"].shape[0] > 1)
    experts = args["weight"].shape[0]
    one = torch.zeros_like(args["offsets"])
    one[1:] = args["x"].shape[0]
    assert card.cost({**args, "offsets": one}).bytes < default_cost(args).bytes - args["weight"].nbytes * (experts - 2) // experts
