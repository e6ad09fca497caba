"""Running a card's cases on its reference, for tests of what an op computes; `harness` has the general checks."""

import numpy as np
import torch
from deepinfer_hal.card import Case, OpCard, get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.weights import prepare_canonical

SEED = 20


def make(case: Case, seed: int = SEED) -> dict:
    """Fresh arguments of one case, which pass the card's own checks."""
    card = get_card(case.op)
    args = card.generate(case, seed, "cpu", prepare_canonical)
    assert tuple(args) == card.arg_names, "generate gives every argument, in the signature's order"
    check_call(card, args)
    return args


def run(case: Case, seed: int = SEED) -> dict:
    """Arguments of the case after the reference ran."""
    args = make(case, seed)
    get_card(case.op).reference(*args.values())
    return args


def assert_within(card: OpCard, args: dict, name: str, expected) -> None:
    """Output `name` agrees with `expected` within the card's tolerance; NaN and infinities sit in the same places."""
    actual = args[name].double().numpy()
    expected = np.asarray(expected, dtype=np.float64)
    tolerance = card.tolerance(args, name)
    np.testing.assert_allclose(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol, err_msg=name)


def count_rows(args: dict, total: int) -> int:
    return total if args["count"] is None else int(args["count"][0])


def is_poison(x: torch.Tensor) -> bool:
    return bool(x.isnan().all()) if x.dtype.is_floating_point else bool((x == torch.full_like(x, _poison(x))).all())


def _poison(x: torch.Tensor) -> int:
    return 0xAA if x.dtype == torch.uint8 else -0x55555556


DENSE_ROWS = [
    (get_card(op), Case(op, dict(D=512, **params)))
    for op, params in (
        ("load_kv", dict(rows=20, format="bf16", block_rows=4, dtype="f32", skip=3, gap=32)),
        ("store_window_kv", dict(rows=3, format="bf16", dtype="f32")),
        ("write_kv", dict(rows=5, dtype="f32", rope=64, format="bf16", block_rows=4, latent=True, padding=64, count=4, skip=3)),
        ("draft_attention", dict(anchors="20,3", block=5, heads=4, dtype="bf16", format="bf16", storage="ring")),
    )
]
"""Stores of BF16 rows, which no case of these cards has."""
