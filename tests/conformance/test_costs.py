"""The bytes and FLOPs of a card are a floor: never more than touching every argument once, never less than the outputs."""

from __future__ import annotations

import pytest
import torch
from deepinfer_hal.card import all_cards, default_cost
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


def test_experts_without_rows_are_not_read():
    card = all_cards()["grouped_gemm"]
    args = next(args for args in arguments(card) if args["x"].shape[0] > 1)
    experts = args["weight"].shape[0]
    one = torch.zeros_like(args["offsets"])
    one[1:] = args["x"].shape[0]
    assert card.cost({**args, "offsets": one}).bytes < default_cost(args).bytes - args["weight"].nbytes * (experts - 2) // experts
