"""store_index_k: quantises index keys into the paged index cache.

The same store as store_compressed_kv for the indexer's keys (V4.1 indexer, section 2.6 of the model notes): by default
`mxfp4_32`, whose blocks hold all values first and all scales after them.
"""

from __future__ import annotations

from deepinfer_hal.card import OpCard, register
from deepinfer_hal.ops._common import valid_rows
from deepinfer_hal.ops._cost import stored_rows_bytes, touching
from deepinfer_hal.ops.store_compressed_kv import PAGED_STORE_SIGNATURE, enumerate_paged_cases, generate
from deepinfer_hal.row_layout import check_cache, write_rows


def store_index_k(x, slots, format, block_rows, count, cache) -> None:
    """x [G, d] float, slots int32 [G] (distinct; -1 stores nothing), cache uint8 [B, block_bytes]."""
    n = valid_rows(count, x.shape[0])
    write_rows(cache, slots[:n], x[:n], format, block_rows)


def enumerate_cases():
    return enumerate_paged_cases("store_index_k", 128, ("mxfp4_32", "f32"))


def check(args) -> None:
    check_cache("store_index_k", "cache", args["cache"], args["format"], args["x"].shape[1], args["block_rows"])


CARD = register(
    OpCard(
        name="store_index_k",
        group="attention",
        summary="Quantises index keys into the paged index cache.",
        signature=PAGED_STORE_SIGNATURE,
        reference=store_index_k,
        rounding="x to the row format, on bits",
        discrete=("cache",),
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(cache=stored_rows_bytes),
    )
)
