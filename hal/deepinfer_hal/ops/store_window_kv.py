"""store_window_kv: quantises one KV row per token into the window store.

cache[slots[t]] = quantise(x[t]), one packed row of `format` (V4.1 KV layouts, section 3 of the model notes: 512 e4m3
codes, then 16 ue8m0 scales). The store is a ring or a flat list; only the slots know which.
"""

from __future__ import annotations

from deepinfer_hal.card import COUNT, Case, OpCard, inout, register, scalar, tensor
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import count_tensor, generator, valid_rows
from deepinfer_hal.ops._cost import stored_rows_bytes, touching
from deepinfer_hal.row_layout import check_cache, write_rows


def store_window_kv(x, slots, format, count, cache) -> None:
    """x [T, D] float, slots int32 [T] (distinct; -1 stores nothing), cache uint8 [N, row_bytes]."""
    n = valid_rows(count, x.shape[0])
    write_rows(cache, slots[:n], x[:n], format, 0)


def enumerate_cases():
    for rows, dtype in ((0, "bf16"), (1, "bf16"), (3, "f32"), (33, "bf16")):
        yield Case("store_window_kv", dict(rows=rows, D=512, dtype=dtype, format="fp8_32"))
    yield Case("store_window_kv", dict(rows=33, D=512, dtype="f32", format="f32"))
    yield Case("store_window_kv", dict(rows=33, D=512, dtype="bf16", format="fp4_16", padding=64, count=20, skip=3))


def generate(case, seed, device, prepare) -> dict:
    p = {"padding": 0, "count": None, "skip": 0, **case.params}
    g = generator(case, seed)
    args = dict(
        x=cases.values(g, (p["rows"], p["D"]), p["dtype"], p["padding"]),
        slots=cases.distinct_slots(g, p["rows"], 268, p["skip"]),
        format=p["format"],
        count=count_tensor(p["count"]),
        cache=cases.empty_cache(268, p["format"], p["D"], 0),
    )
    return cases.on(device, args)


def check(args) -> None:
    check_cache("store_window_kv", "cache", args["cache"], args["format"], args["x"].shape[1], 0)


CARD = register(
    OpCard(
        name="store_window_kv",
        group="attention",
        summary="Quantises KV rows into the window store.",
        signature=(
            tensor("x", "float", "T D"),
            tensor("slots", "i32", "T"),
            scalar("format", "str"),
            COUNT,
            inout("cache", "u8", "N _"),
        ),
        reference=store_window_kv,
        rounding="x to the row format, on bits",
        discrete=("cache",),
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(cache=stored_rows_bytes),
    )
)
