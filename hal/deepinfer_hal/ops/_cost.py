"""Bytes of calls that touch only some rows of a store, a table or a history: the rest does not count towards a floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_hal.card import Cost, default_cost
from deepinfer_hal.row_layout import block_bytes
from deepinfer_hal.weights import WeightHandle

Args = Mapping[str, Any]


def touching(**stores: Callable[[Args], int]) -> Callable[[Args], Cost]:
    """Cost of a card: every argument once, but of the named ones only the bytes that their function gives."""

    def cost(args: Args) -> Cost:
        others = {name: value for name, value in args.items() if name not in stores}
        return Cost(default_cost(others).bytes + sum(moved(args) for moved in stores.values()))

    return cost


def weight_rows_bytes(weight: WeightHandle, rows: int) -> int:
    """Bytes of so many rows [.., N, K] of a weight; rows asked for twice count once at most N."""
    return weight.nbytes * min(rows, weight.shape[-2]) // max(weight.shape[-2], 1)


def stored_rows_bytes(args: Args) -> int:
    """One row of a store for each row of x, in the call's row format."""
    rows, width = args["x"].shape
    return rows * block_bytes(args["format"], width, 1)


def rope_rows_bytes(args: Args) -> int:
    """One row of the rotation table per token."""
    return args["positions"].numel() * args["table"].shape[1] * 4


def rotated_bytes(args: Args) -> int:
    """The last r dims of each head, read and written; the others stay where they are."""
    tokens, heads, _ = args["x"].shape
    return 2 * tokens * heads * args["table"].shape[1] * args["x"].element_size()


def mixing_cost(args: Args) -> Cost:
    """Every argument once; the product that makes a token's mixing coefficients from its streams."""
    return Cost(default_cost(args).bytes, 2 * args["streams"].shape[0] * args["fn"].numel())
