"""load_kv: gathers and decodes stored rows into a dense tensor.

out[n] = dequantise(row at slots[n]); within BF16's exponent range every quantised row format decodes to it exactly.
block_rows 0 reads a window store.
"""

from __future__ import annotations

from deepinfer_hal.card import Case, OpCard, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import dtype_of, generator, poisoned
from deepinfer_hal.ops._cost import touching
from deepinfer_hal.row_layout import block_bytes, check_cache, read_rows


def load_kv(cache, slots, format, block_rows, out) -> None:
    """cache uint8; slots int32 [N] (-1 leaves the row untouched); out [N, D], rounded once to its dtype."""
    live = (slots >= 0).nonzero().squeeze(1)
    out[live] = read_rows(cache, slots[live], format, out.shape[1], block_rows).to(out.dtype)


def enumerate_cases():
    for format, width in (("fp8_32", 512), ("fp4_16", 512), ("mxfp4_32", 128), ("f32", 512)):
        for rows, block_rows, dtype in ((0, 64, "bf16"), (1, 0, "bf16"), (33, 64, "f32"), (33, 128, "bf16")):
            yield Case("load_kv", dict(rows=rows, D=width, format=format, block_rows=block_rows, dtype=dtype))
        yield Case("load_kv", dict(rows=20, D=width, format=format, block_rows=4, dtype="bf16", skip=3, gap=32))


def generate(case, seed, device, prepare) -> dict:
    p = {"skip": 0, "gap": 0, **case.params}
    g, per_block = generator(case, seed), max(p["block_rows"], 1)
    blocks = max(4, -(-p["rows"] // per_block) + 1)
    slots = cases.distinct_slots(g, p["rows"], blocks * per_block, p["skip"])
    cache = cases.empty_cache(blocks, p["format"], p["D"], p["block_rows"], p["gap"])
    cases.fill_rows(g, cache, slots, p["format"], p["D"], p["block_rows"])
    args = dict(
        cache=cache,
        slots=slots,
        format=p["format"],
        block_rows=p["block_rows"],
        out=poisoned(p["rows"], p["D"], dtype=dtype_of(p["dtype"])),
    )
    return cases.on(device, args)


def tolerance(args, name):
    return sum_tolerance(args["out"].dtype, 1)


def check(args) -> None:
    check_cache("load_kv", "cache", args["cache"], args["format"], args["out"].shape[1], args["block_rows"])


CARD = register(
    OpCard(
        name="load_kv",
        group="attention",
        summary="Gathers and decodes stored rows.",
        signature=(
            tensor("cache", "u8", "_ _"),
            tensor("slots", "i32", "N"),
            scalar("format", "str"),
            scalar("block_rows", "int"),
            out("out", "stream", "N D"),
        ),
        reference=load_kv,
        rounding="the decoded value once to out's dtype",
        tolerance=tolerance,
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(cache=lambda args: args["slots"].shape[0] * block_bytes(args["format"], args["out"].shape[1], 1)),
    )
)
