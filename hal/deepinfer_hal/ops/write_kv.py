"""write_kv: norm, rope, quantise and store of KV rows in one op (composite).

z = rms_norm(x); latent = z if asked for; cache[slots] = quantise(rope(z, positions)) (V4.1 attention, sections 2.4,
2.5 and 2.6 of the model notes). block_rows 0 writes the window store; otherwise a paged cache, whose compressed row j
has position j * ratio, given by the caller in `positions`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, inout, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import count_tensor, dtype_of, generator, poisoned, valid_rows
from deepinfer_hal.ops._cost import rope_rows_bytes, stored_rows_bytes, touching
from deepinfer_hal.ops.rms_norm import rms_norm
from deepinfer_hal.ops.rope import rope
from deepinfer_hal.ops.store_compressed_kv import store_compressed_kv
from deepinfer_hal.ops.store_index_k import store_index_k
from deepinfer_hal.ops.store_window_kv import store_window_kv
from deepinfer_hal.row_layout import check_cache, code_bytes

_REFERENCES = SimpleNamespace(
    rms_norm=rms_norm, rope=rope, store_window_kv=store_window_kv, store_compressed_kv=store_compressed_kv,
    store_index_k=store_index_k,
)  # fmt: skip


def write_kv(
    x, norm_weight, eps, positions, table, slots, format, block_rows, count, cache, latent, *, parts: Any = _REFERENCES
) -> None:
    """x [T, D] float, norm_weight [D], positions int32 [T], table float32 [P, r] (the last r of the D dims turn), slots
    int32 [T] (distinct; -1 skips the row, latent too), cache uint8, latent [T, D] or None."""
    code_bytes(format, x.shape[1])  # an unknown format is refused before the latent is written
    n = valid_rows(count, x.shape[0])
    rows = (slots[:n] >= 0).nonzero().squeeze(1)
    normed = torch.empty(rows.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    parts.rms_norm(x[rows], norm_weight, eps, None, normed, None, None)
    if latent is not None:
        latent[rows] = normed.to(latent.dtype)
    parts.rope(positions[rows], table, False, None, normed[:, None, :])
    if block_rows == 0:
        parts.store_window_kv(normed, slots[rows], format, None, cache)
    else:
        store = parts.store_index_k if format == "mxfp4_32" else parts.store_compressed_kv
        store(normed, slots[rows], format, block_rows, None, cache)


def enumerate_cases():
    window = dict(D=512, rope=64, format="fp8_32", block_rows=0, latent=False)
    paged = dict(D=512, rope=64, format="fp4_16", block_rows=64, latent=True)
    index = dict(D=128, rope=64, format="mxfp4_32", block_rows=64, latent=False)
    for rows in (0, 1, 3, 33):
        for form in (window, paged, index):
            yield Case("write_kv", dict(rows=rows, dtype="bf16", **form))
    yield Case("write_kv", dict(rows=33, dtype="f32", **window, padding=64, count=20, skip=3))
    yield Case("write_kv", dict(rows=33, dtype="f32", **paged, skip=2))


def generate_norm_rope(p: dict, g: torch.Generator) -> dict:
    """x, norm_weight, eps, positions, table, slots, format: what write_kv and store_draft_kv share."""
    return dict(
        x=cases.values(g, (p["rows"], p["D"]), p["dtype"], p["padding"]),
        norm_weight=1 + 0.2 * cases.values(g, (p["D"],), p["dtype"]),
        eps=1e-20,
        positions=torch.randint(0, 300, (p["rows"],), generator=g, dtype=torch.int32),
        table=cases.rope_table(300, p["rope"]),
        slots=cases.distinct_slots(g, p["rows"], 256, p["skip"]),
        format=p["format"],
    )


def generate(case, seed, device, prepare) -> dict:
    p = {"padding": 0, "count": None, "skip": 0, **case.params}
    args = generate_norm_rope(p, generator(case, seed))
    blocks = 256 // max(p["block_rows"], 1)
    args["block_rows"] = p["block_rows"]
    args["count"] = count_tensor(p["count"])
    args["cache"] = cases.empty_cache(blocks, p["format"], p["D"], p["block_rows"])
    args["latent"] = poisoned(p["rows"], p["D"], dtype=dtype_of(p["dtype"])) if p["latent"] else None
    return cases.on(device, args)


def tolerance(args, name):
    return sum_tolerance(args["x"].dtype, args["x"].shape[1])


def check(args) -> None:
    check_cache("write_kv", "cache", args["cache"], args["format"], args["x"].shape[1], args["block_rows"])


CARD = register(
    OpCard(
        name="write_kv",
        group="attention",
        summary="Composite: rms_norm, rope, quantise, store of KV rows.",
        signature=(
            tensor("x", "float", "T D"),
            tensor("norm_weight", "float", "D"),
            scalar("eps", "float"),
            tensor("positions", "i32", "T"),
            tensor("table", "f32", "P r"),
            tensor("slots", "i32", "T"),
            scalar("format", "str"),
            scalar("block_rows", "int"),
            COUNT,
            inout("cache", "u8", "_ _"),
            out("latent", "stream", "T D", optional=True),
        ),
        reference=write_kv,
        rounding="the normed row to x's dtype; the roped row to x's dtype; then to the row format, on bits",
        tolerance=tolerance,
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(cache=stored_rows_bytes, table=rope_rows_bytes),
        decomposition=("rms_norm", "rope", "store_window_kv", "store_compressed_kv", "store_index_k"),
    )
)
