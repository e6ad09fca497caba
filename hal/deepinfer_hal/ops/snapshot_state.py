"""snapshot_state: copies whole per-request state slots (window rings and carry) within the state store."""

from __future__ import annotations

from deepinfer_hal.card import OpCard, inout, register, tensor
from deepinfer_hal.ops._cost import touching
from deepinfer_hal.ops.copy_rows import copy_where_valid, generate_pairs, pair_cases


def snapshot_state(src, dst, state) -> None:
    """state[dst[i]] = state[src[i]]: src, dst int32 [n] (destinations distinct and not read; -1 copies nothing), state
    uint8 [slots, bytes]."""
    copy_where_valid(state, src, dst, state)


def enumerate_cases():
    return pair_cases("snapshot_state")


def generate(case, seed, device, prepare) -> dict:
    return generate_pairs(case, seed, device, "state")


CARD = register(
    OpCard(
        name="snapshot_state",
        group="state",
        summary="Copies per-request state slots within the state store.",
        signature=(tensor("src", "i32", "n"), tensor("dst", "i32", "n"), inout("state", "u8", "slots_total _")),
        reference=snapshot_state,
        discrete=("state",),
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(state=lambda args: 2 * args["src"].shape[0] * args["state"].shape[1]),
    )
)
