"""draft_attention: attention of a request's draft block over its window ring and the block itself, both directions.

Keys of every one of the B queries of request r, in this order: window positions max(0, origin_r, anchor_r -
window_tokens + 1)..anchor_r, then the request's B draft rows (V4.1 DSpark, section 2.11 of the model notes). K = V,
sink and pieces of 64 keys as in sparse_attention.
"""

from __future__ import annotations

import torch

from deepinfer_hal.card import COUNT, Case, Cost, OpCard, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._attention import attend, padded_length, place_rows, rows_per_chunk, window_slots
from deepinfer_hal.ops._common import count_tensor, dtype_of, generator, poisoned, valid_rows, wide
from deepinfer_hal.ops.sparse_attention import make_window
from deepinfer_hal.row_layout import block_bytes, check_cache


def draft_attention(
    q, window, window_base, window_origin, window_modulo, window_format, anchor, draft_kv, draft_block, sink, scale,
    window_tokens, count, out,
) -> None:  # fmt: skip
    """q [R*B, h, D] float, window uint8 [N, row_bytes], window_* and anchor int32 [R] (anchor -1: request untouched),
    draft_kv uint8 [R*B, row_bytes] in window_format, sink float32 [h], count of requests, out [R*B, h, D]."""
    n = valid_rows(count, anchor.shape[0])
    live = (anchor[:n] >= 0).nonzero().squeeze(1)
    if live.numel() == 0:
        return
    last, origin = anchor[live].long(), window_origin.long()[live]
    first = torch.maximum((last - window_tokens + 1).clamp_min(0), origin)
    slots = window_slots(first, last, window_base.long()[live], origin, window_modulo.long()[live])
    window_count = (slots >= 0).sum(1)
    block = torch.arange(draft_block, device=q.device)
    drafts = live[:, None] * draft_block + block
    lengths = window_count + draft_block
    heads, width = q.shape[1:]
    size = padded_length(int(lengths.max()))
    for some in torch.arange(live.numel(), device=q.device).split(rows_per_chunk(size, draft_block * heads, width)):
        rows = drafts[some].flatten()
        # All queries of a block share its keys, so they go through as extra heads of one row.
        query = wide(q[rows]).reshape(some.numel(), draft_block * heads, width)
        keys = torch.zeros(some.numel(), size, width, dtype=query.dtype, device=q.device)
        place_rows(keys, torch.zeros_like(some), slots[some], window, window_format, 0)
        place_rows(keys, window_count[some], drafts[some], draft_kv, window_format, 0)
        result = attend(query, keys, lengths[some], sink.to(query.dtype).repeat(draft_block), scale)
        out[rows] = result.reshape(rows.numel(), heads, width).to(out.dtype)


def enumerate_cases():
    nano = dict(block=5, heads=4, D=512, dtype="bf16", format="fp8_32", storage="ring")
    for anchors in ("", "0", "3,127,300", "128,200,7,140"):
        yield Case("draft_attention", dict(anchors=anchors, **nano))
    yield Case("draft_attention", dict(anchors="200,5,60", **nano, count=2, skip=2))
    yield Case("draft_attention", dict(anchors="130,9", **{**nano, "dtype": "f32", "format": "f32", "storage": "flat"}))
    yield Case("draft_attention", dict(anchors="500,64", **{**nano, "heads": 64}))
    # 70 query rows, more than a GPU of 132 multiprocessors has pairs of them: a kernel may take another way from there on.
    yield Case("draft_attention", dict(anchors="3,127,300,128,200,7,140,0,64,90,135,20,11,250", **nano))


def generate(case, seed, device, prepare) -> dict:
    p = {"count": None, "skip": 0, **case.params}
    g = generator(case, seed)
    anchors = [int(a) for a in str(p["anchors"]).split(",") if a]
    anchor = cases.ints(anchors)
    if p["skip"]:
        anchor[p["skip"] - 1 :: p["skip"]] = -1
    rows = len(anchors) * p["block"]
    draft_kv = cases.empty_cache(rows, p["format"], p["D"], 0)
    cases.fill_rows(g, draft_kv, torch.arange(rows), p["format"], p["D"], 0)
    args = dict(
        q=cases.values(g, (rows, p["heads"], p["D"]), p["dtype"]),
        **make_window(g, [(a, 1) for a in anchors], p["format"], p["D"], 128, p["storage"]),
        anchor=anchor,
        draft_kv=draft_kv,
        draft_block=p["block"],
        sink=cases.values(g, (p["heads"],)),
        scale=p["D"] ** -0.5,
        window_tokens=128,
        count=count_tensor(p["count"]),
        out=poisoned(rows, p["heads"], p["D"], dtype=dtype_of(p["dtype"])),
    )
    return cases.on(device, args)


def tolerance(args, name):
    keys = args["window_tokens"] + args["draft_block"]
    return sum_tolerance(args["out"].dtype, args["q"].shape[-1] + keys, magnitude=4.0)


def cost(args) -> Cost:
    """A block's keys read once for all its queries; two products of D per head, query and key."""
    rows, heads, width = args["q"].shape
    keys = args["window_tokens"] + args["draft_block"]
    stored = args["anchor"].shape[0] * keys * block_bytes(args["window_format"], width, 1)
    return Cost(2 * args["q"].numel() * args["q"].element_size() + stored, 4 * rows * heads * width * keys)


def check(args) -> None:
    width, requests, block = args["q"].shape[-1], args["anchor"].shape[0], args["draft_block"]
    check_cache("draft_attention", "window", args["window"], args["window_format"], width, 0)
    check_cache("draft_attention", "draft_kv", args["draft_kv"], args["window_format"], width, 0)
    if block < 1 or args["q"].shape[0] != requests * block:
        raise BadCall(
            f"draft_attention: {requests} requests with draft blocks of {block} need {requests * block} query rows, "
            f"got {args['q'].shape[0]}"
        )


CARD = register(
    OpCard(
        name="draft_attention",
        group="attention",
        summary="Draft-block attention over the window ring and the block, both directions.",
        signature=(
            tensor("q", "stream", "rows h D"),
            tensor("window", "u8", "N _"),
            tensor("window_base", "i32", "R"),
            tensor("window_origin", "i32", "R"),
            tensor("window_modulo", "i32", "R"),
            scalar("window_format", "str"),
            tensor("anchor", "i32", "R"),
            tensor("draft_kv", "u8", "rows _"),
            scalar("draft_block", "int"),
            tensor("sink", "f32", "h"),
            scalar("scale", "float"),
            scalar("window_tokens", "int"),
            COUNT,
            out("out", "stream", "rows h D"),
        ),
        reference=draft_attention,
        rounding="float32 throughout, once to out's dtype",
        invariance="a request's bits depend on its own key list and queries alone",
        reference_invariant="no",
        tolerance=tolerance,
        check=check,
        cost=cost,
        enumerate_cases=enumerate_cases,
        generate=generate,
    )
)
