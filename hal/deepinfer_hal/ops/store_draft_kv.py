"""store_draft_kv: norm, rope, quantise and store of the draft model's context rows.

write_kv on a draft layer's window ring: main KV = quantise(rope(rms_norm(x))) for every token of the target model (V4.1
DSpark, section 2.11 of the model notes).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deepinfer_hal.card import COUNT, Case, OpCard, inout, register, scalar, tensor
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import count_tensor, generator
from deepinfer_hal.ops._cost import rope_rows_bytes, stored_rows_bytes, touching
from deepinfer_hal.ops.write_kv import generate_norm_rope, tolerance, write_kv
from deepinfer_hal.row_layout import check_cache

_REFERENCES = SimpleNamespace(write_kv=write_kv)


def store_draft_kv(
    x, norm_weight, eps, positions, table, slots, format, count, cache, *, parts: Any = _REFERENCES
) -> None:
    """x [T, D] float, norm_weight [D], positions int32 [T], table float32 [P, r], slots int32 [T] (distinct; -1 stores
    nothing), cache uint8 [N, row_bytes]."""
    parts.write_kv(x, norm_weight, eps, positions, table, slots, format, 0, count, cache, None)


def enumerate_cases():
    for rows in (0, 1, 5, 33):
        yield Case("store_draft_kv", dict(rows=rows, D=512, rope=64, dtype="bf16", format="fp8_32"))
    ragged = dict(padding=32, count=6, skip=4)
    yield Case("store_draft_kv", dict(rows=9, D=512, rope=64, dtype="f32", format="fp8_32", **ragged))


def generate(case, seed, device, prepare) -> dict:
    p = {"padding": 0, "count": None, "skip": 0, **case.params}
    args = generate_norm_rope(p, generator(case, seed))
    args["count"] = count_tensor(p["count"])
    args["cache"] = cases.empty_cache(256, p["format"], p["D"], 0)
    return cases.on(device, args)


def check(args) -> None:
    check_cache("store_draft_kv", "cache", args["cache"], args["format"], args["x"].shape[1], 0)


CARD = register(
    OpCard(
        name="store_draft_kv",
        group="draft",
        summary="Norm, rope, quantise, store of draft context rows.",
        signature=(
            tensor("x", "float", "T D"),
            tensor("norm_weight", "float", "D"),
            scalar("eps", "float"),
            tensor("positions", "i32", "T"),
            tensor("table", "f32", "P r"),
            tensor("slots", "i32", "T"),
            scalar("format", "str"),
            COUNT,
            inout("cache", "u8", "N _"),
        ),
        reference=store_draft_kv,
        rounding="as write_kv",
        tolerance=tolerance,
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(cache=stored_rows_bytes, table=rope_rows_bytes),
        decomposition=("write_kv",),
    )
)
