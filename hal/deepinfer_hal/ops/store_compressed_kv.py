"""store_compressed_kv: quantises compressed KV rows into the paged cache.

Row slots[g] (block * block_rows + row in block) becomes quantise(x[g]) (V4.1 KV layouts, section 3 of the model
notes: by default 256 bytes of e2m1 pairs, then 32 e4m3 scales).
"""

from __future__ import annotations

from deepinfer_hal.card import COUNT, Case, OpCard, inout, register, scalar, tensor
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import count_tensor, generator, valid_rows
from deepinfer_hal.ops._cost import stored_rows_bytes, touching
from deepinfer_hal.row_layout import check_cache, write_rows


def store_compressed_kv(x, slots, format, block_rows, count, cache) -> None:
    """x [G, D] float, slots int32 [G] (distinct; -1 stores nothing), cache uint8 [B, block_bytes]."""
    n = valid_rows(count, x.shape[0])
    write_rows(cache, slots[:n], x[:n], format, block_rows)


def enumerate_paged_cases(op: str, width: int, formats: tuple[str, ...]):
    """Cases of a paged store: every format, empty, skipped, counted, padded between blocks."""
    for format in formats:
        for rows in (0, 1, 33):
            yield Case(op, dict(rows=rows, D=width, dtype="bf16", format=format, block_rows=64))
        yield Case(op, dict(rows=33, D=width, dtype="f32", format=format, block_rows=128, gap=32, skip=2))
        yield Case(op, dict(rows=20, D=width, dtype="f32", format=format, block_rows=4, padding=64, count=9))


def enumerate_cases():
    return enumerate_paged_cases("store_compressed_kv", 512, ("fp4_16", "fp8_32", "f32"))


def generate(case, seed, device, prepare) -> dict:
    p = {"padding": 0, "count": None, "skip": 0, "gap": 0, **case.params}
    g = generator(case, seed)
    args = dict(
        x=cases.values(g, (p["rows"], p["D"]), p["dtype"], p["padding"]),
        slots=cases.distinct_slots(g, p["rows"], 6 * p["block_rows"], p["skip"]),
        format=p["format"],
        block_rows=p["block_rows"],
        count=count_tensor(p["count"]),
        cache=cases.empty_cache(6, p["format"], p["D"], p["block_rows"], p["gap"]),
    )
    return cases.on(device, args)


def check(args) -> None:
    check_cache("store_compressed_kv", "cache", args["cache"], args["format"], args["x"].shape[1], args["block_rows"])


PAGED_STORE_SIGNATURE = (
    tensor("x", "float", "G D"),
    tensor("slots", "i32", "G"),
    scalar("format", "str"),
    scalar("block_rows", "int"),
    COUNT,
    inout("cache", "u8", "B _"),
)

CARD = register(
    OpCard(
        name="store_compressed_kv",
        group="attention",
        summary="Quantises compressed KV rows into the paged cache.",
        signature=PAGED_STORE_SIGNATURE,
        reference=store_compressed_kv,
        rounding="x to the row format, on bits",
        discrete=("cache",),
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(cache=stored_rows_bytes),
    )
)
