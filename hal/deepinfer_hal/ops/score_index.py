"""score_index: the lightning indexer's score of every visible index key for each query row.

score(t, j) = sum_h w[t, h] * relu(q[t, h] . k_j) in float32 for j < visible[t], else -inf (V4.1 indexer, section 2.6
of the model notes). With candidate blocks (section 2.7) only their rows are scored: column c * candidate_block + i is
row candidates[t, c] * candidate_block + i.
"""

from __future__ import annotations

import torch

from deepinfer_hal import formats
from deepinfer_hal.card import COUNT, Case, Cost, OpCard, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import check_pairs, count_tensor, dtype_of, generator, poisoned, valid_rows, wide
from deepinfer_hal.row_layout import block_bytes, check_cache, read_rows

PRODUCTS = 4 << 20
"""Bound on the per-head products of one chunk: query rows x heads x keys."""


def score_index(
    q, q_scale, weights, cache, block_table, row_to_req, visible, candidates, candidate_block, format, block_rows,
    count, scores, ) -> None: # fmt: skip
    """q uint8 [T, h, d/2] mxfp4_32 with q_scale uint8 [T, h, d/32], or dense [T, h, d]; weights [T, h]; cache uint8
    [B, block_bytes]; block_table int32 [R, Bmax]; visible int32 [T]; candidates int32 [T, C] or None; scores float32
    [T, K]. A row whose request is -1 is left untouched."""
    n = valid_rows(count, q.shape[0])
    for request in torch.unique(row_to_req[:n]).tolist():
        if request < 0:
            continue
        rows = (row_to_req[:n] == request).nonzero().squeeze(1)
        seen = visible[rows].long()
        longest = int(seen.max())
        if candidates is None:
            longest = min(longest, scores.shape[1])
        query = wide(q[rows] if q_scale is None else formats.dequantise(q[rows], q_scale[rows], "mxfp4_32"))
        keys = wide(_request_keys(cache, block_table[request], longest, format, query.shape[-1], block_rows))
        chunk = max(1, PRODUCTS // max(1, query.shape[1] * longest))
        for some in torch.arange(rows.numel(), device=q.device).split(chunk):
            scored = _scores(query[some], wide(weights[rows[some]]), keys)
            scored = scored.masked_fill(torch.arange(longest, device=q.device) >= seen[some, None], float("-inf"))
            if candidates is not None:
                scored = _at_candidates(scored, candidates[rows[some]].long(), candidate_block)
            scores[rows[some], : scored.shape[1]] = scored.to(scores.dtype)
            scores[rows[some], scored.shape[1] :] = float("-inf")


def _request_keys(cache, block_table, rows: int, format: str, width: int, block_rows: int) -> torch.Tensor:
    """float32 [rows, width]: a request's first `rows` index keys."""
    row = torch.arange(rows, device=cache.device)
    slots = block_table.long()[row // block_rows] * block_rows + row % block_rows
    return read_rows(cache, slots, format, width, block_rows)


def _scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[t, n]: query [t, h, d], weights [t, h], keys [n, d]. Heads are added in ascending order."""
    t, heads, width = query.shape
    products = (query.reshape(t * heads, width) @ keys.T).relu_().reshape(t, heads, -1) * weights[:, :, None]
    total = products[:, 0]
    for h in range(1, heads):
        total = total + products[:, h]
    return total


def _at_candidates(scored: torch.Tensor, candidates: torch.Tensor, block: int) -> torch.Tensor:
    """[t, C * block]: the columns of the candidate blocks; -inf for padding and rows that are not there."""
    row = (candidates[:, :, None] * block + torch.arange(block, device=scored.device)).flatten(1)
    there = (candidates >= 0).repeat_interleave(block, 1) & (row < scored.shape[1])
    if scored.shape[1] == 0:
        return torch.full(row.shape, float("-inf"), dtype=scored.dtype, device=scored.device)
    return torch.where(there, scored.gather(1, torch.where(there, row, 0)), float("-inf"))


def enumerate_cases():
    nano = dict(heads=4, d=128, q="mxfp4_32", format="mxfp4_32", block_rows=64, dtype="bf16", ratio=2)
    yield Case("score_index", dict(requests="", **nano))
    yield Case("score_index", dict(requests="0+1", **nano))
    yield Case("score_index", dict(requests="0+3,127+1,300+6", **nano))
    yield Case("score_index", dict(requests="120+33", **{**nano, "ratio": 1, "block_rows": 128}))
    yield Case("score_index", dict(requests="200+5,3+4", **nano, count=6, padding=4, skip=4))
    yield Case("score_index", dict(requests="300+3,40+1", **{**nano, "ratio": 1}, candidates=32))
    dense = {**nano, "q": "dense", "dtype": "f32", "format": "f32"}
    yield Case("score_index", dict(requests="140+3,5+2", **dense))
    yield Case("score_index", dict(requests="250+3,5+2", **{**nano, "heads": 32, "q": "dense"}, candidates=8))
    yield Case("score_index", dict(requests="700+2,130+1", **{**nano, "heads": 32}))


def generate(case, seed, device, prepare) -> dict:
    p = {"count": None, "padding": 0, "skip": 0, "candidates": 0, **case.params}
    g, requests = generator(case, seed), cases.parse_requests(p["requests"])
    positions, row_to_req, _ = cases.token_rows(requests)
    visible = ((positions + 1) // p["ratio"]).to(torch.int32)
    rows, width, longest = positions.shape[0], p["d"], int(visible.max()) if len(positions) else 0
    q, q_scale = cases.values(g, (rows, p["heads"], width), p["dtype"]), None
    if p["q"] == "mxfp4_32":
        shape = (rows, p["heads"])
        empty = torch.zeros(*shape, width // 2, dtype=torch.uint8), torch.zeros(*shape, width // 32, dtype=torch.uint8)
        q, q_scale = formats.quantise(q, "mxfp4_32") if rows else empty
    table, cache = cases.paged_cache(g, [(first + n) // p["ratio"] for first, n in requests], p["format"], width, p)
    candidates = _make_candidates(g, visible, p["candidates"]) if p["candidates"] else None
    if p["skip"]:
        row_to_req[p["skip"] - 1 :: p["skip"]] = -1
    args = dict(
        q=q,
        q_scale=q_scale,
        weights=cases.values(g, (rows, p["heads"]), p["dtype"], p["padding"]),
        cache=cache,
        block_table=table,
        row_to_req=row_to_req,
        visible=visible,
        candidates=candidates,
        candidate_block=8,
        format=p["format"],
        block_rows=p["block_rows"],
        count=count_tensor(p["count"]),
        scores=poisoned(rows, 8 * p["candidates"] or longest + 5, dtype=dtype_of("f32")),
    )
    return cases.on(device, args)


def _make_candidates(g: torch.Generator, visible: torch.Tensor, blocks: int) -> torch.Tensor:
    """int32 [T, blocks]: up to `blocks` ascending 8-row blocks that hold visible rows, -1 after them."""
    chosen = torch.full((visible.shape[0], blocks), -1, dtype=torch.int32)
    for t, seen in enumerate(visible.tolist()):
        some = torch.randperm(-(-seen // 8), generator=g)[:blocks].sort().values
        chosen[t, : some.shape[0]] = some.to(torch.int32)
    return chosen


def tolerance(args, name):
    heads, width = args["q"].shape[1], args["q"].shape[2]
    return sum_tolerance(torch.float32, heads * width, magnitude=16.0)


def cost(args) -> Cost:
    """Each request's visible keys read once; a product of d per head, row and visible key."""
    rows, heads, width = args["q"].shape
    width = width if args["q_scale"] is None else 2 * width
    seen = args["visible"].clamp(max=args["scores"].shape[1])
    longest = [int(seen[args["row_to_req"] == r].max()) for r in torch.unique(args["row_to_req"][:rows])]
    ends = args["q"].numel() * args["q"].element_size() + 4 * args["scores"].numel()
    keys = sum(longest) * block_bytes(args["format"], width, 1)
    return Cost(ends + keys, int(seen.sum()) * heads * (2 * width + 3))


def check(args) -> None:
    check_pairs("score_index", args, ("q", "q_scale"))
    width = args["q"].shape[2] * (1 if args["q_scale"] is None else 2)
    check_cache("score_index", "cache", args["cache"], args["format"], width, args["block_rows"])
    if args["candidates"] is None:
        return
    wanted = args["candidates"].shape[1] * args["candidate_block"]
    if args["candidate_block"] < 1 or args["scores"].shape[1] != wanted:
        raise BadCall(
            f"score_index: {args['candidates'].shape[1]} candidate blocks of {args['candidate_block']} rows need "
            f"scores with {wanted} columns, got {args['scores'].shape[1]}"
        )


CARD = register(
    OpCard(
        name="score_index",
        group="attention",
        summary="Lightning indexer scores over all visible rows or over candidate blocks.",
        signature=(
            tensor("q", "act", "T h _"),
            tensor("q_scale", "u8", "T h _", optional=True),
            tensor("weights", "float", "T h"),
            tensor("cache", "u8", "B _"),
            tensor("block_table", "i32", "R _"),
            tensor("row_to_req", "i32", "T"),
            tensor("visible", "i32", "T"),
            tensor("candidates", "i32", "T C", optional=True),
            scalar("candidate_block", "int"),
            scalar("format", "str"),
            scalar("block_rows", "int"),
            COUNT,
            out("scores", "f32", "T K"),
        ),
        reference=score_index,
        rounding="none: float32 products and sums of decoded values, heads added in ascending order",
        invariance="a row's scores depend on its own query and the stored keys alone",
        reference_invariant="no",
        tolerance=tolerance,
        check=check,
        cost=cost,
        enumerate_cases=enumerate_cases,
        generate=generate,
    )
)
