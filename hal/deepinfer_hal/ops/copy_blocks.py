"""copy_blocks: copies whole cache blocks within one paged cache, for a block that two requests can no longer share."""

from __future__ import annotations

from deepinfer_hal.card import OpCard, inout, register, tensor
from deepinfer_hal.ops._cost import touching
from deepinfer_hal.ops.copy_rows import copy_where_valid, generate_pairs, pair_cases


def copy_blocks(src, dst, cache) -> None:
    """cache[dst[i]] = cache[src[i]]: src, dst int32 [n] (destinations distinct and not read; -1 copies nothing), cache
    uint8 [B, block_bytes]."""
    copy_where_valid(cache, src, dst, cache)


def enumerate_cases():
    return pair_cases("copy_blocks")


def generate(case, seed, device, prepare) -> dict:
    return generate_pairs(case, seed, device, "cache")


CARD = register(
    OpCard(
        name="copy_blocks",
        group="state",
        summary="Copies cache blocks within a paged cache.",
        signature=(tensor("src", "i32", "n"), tensor("dst", "i32", "n"), inout("cache", "u8", "B _")),
        reference=copy_blocks,
        discrete=("cache",),
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(cache=lambda args: 2 * args["src"].shape[0] * args["cache"].shape[1]),
    )
)
