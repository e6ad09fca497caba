"""sparse_attention: each query row over its window rows and its selected compressed rows, with a sink.

Keys of row t (request r, position p), in this order: window positions max(0, origin_r, p - window_tokens + 1)..p at
window row base_r + (s - origin_r) % modulo_r; then compressed rows rows[t] ascending up to the first -1. K = V, a =
scale * q . k, weights exp(a) / (sum exp(a) + exp(sink_h)); no key gives 0 (V4.1 attention, section 2.4 of the model
notes). One numeric definition for prefill, decode and verify: pieces of 64 keys of the row's own list, merged left to
right. Rows that load_kv decoded into a BF16 tensor are stores of format bf16 (its bytes as window, or as blocks) and give
what the rows they came from give.
"""

from __future__ import annotations

import torch

from deepinfer_hal.card import COUNT, Case, Cost, OpCard, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._attention import attend, padded_length, place_rows, rows_per_chunk, window_slots
from deepinfer_hal.ops._common import count_tensor, dtype_of, generator, poisoned, valid_rows, wide
from deepinfer_hal.row_layout import block_bytes, check_cache


def sparse_attention(
    q, window, window_base, window_origin, window_modulo, window_format, compressed, block_table, compressed_format,
    block_rows, rows, row_to_req, positions, sink, scale, window_tokens, count, out,
) -> None:  # fmt: skip
    """q [T, h, D] float, window uint8 [N, row_bytes], window_* int32 [R], compressed uint8 [B, block_bytes] or None,
    block_table int32 [R, Bmax], rows int32 [T, k] or None, sink float32 [h], out [T, h, D] rounded once.

    A row whose request or position is -1 is left untouched.
    """
    n = valid_rows(count, q.shape[0])
    live = ((row_to_req[:n] >= 0) & (positions[:n] >= 0)).nonzero().squeeze(1)
    if live.numel() == 0:
        return
    request, last = row_to_req[live].long(), positions[live].long()
    origin = window_origin.long()[request]
    first = torch.maximum((last - window_tokens + 1).clamp_min(0), origin)
    slots = window_slots(first, last, window_base.long()[request], origin, window_modulo.long()[request])
    window_count = (slots >= 0).sum(1)
    selected = selected_slots(rows, live, request, block_table, block_rows)
    lengths = window_count + (selected >= 0).sum(1)
    heads, width = q.shape[1:]
    size = padded_length(int(lengths.max()))
    for some in torch.arange(live.numel(), device=q.device).split(rows_per_chunk(size, heads, width)):
        query = wide(q[live[some]])
        keys = torch.zeros(some.numel(), size, width, dtype=query.dtype, device=q.device)
        place_rows(keys, torch.zeros_like(some), slots[some], window, window_format, 0)
        place_rows(keys, window_count[some], selected[some], compressed, compressed_format, block_rows)
        out[live[some]] = attend(query, keys, lengths[some], sink.to(query.dtype), scale).to(out.dtype)


def selected_slots(rows, live, request, block_table, block_rows: int) -> torch.Tensor:
    """int64 [t, k] cache slots of the selected rows up to the first -1, -1 after it; [t, 0] without a selection."""
    if rows is None:
        return torch.zeros(live.numel(), 0, dtype=torch.int64, device=live.device)
    row = rows[live].long()
    valid = torch.cumprod((row >= 0).long(), dim=1) > 0
    row = torch.where(valid, row, 0)
    block = block_table.long()[request[:, None], row // block_rows] if row.shape[1] else row
    return torch.where(valid, block * block_rows + row % block_rows, -1)


def enumerate_cases():
    nano = dict(heads=4, D=512, k=64, block_rows=64, dtype="bf16", window="fp8_32", compressed="fp4_16", storage="ring")
    yield Case("sparse_attention", dict(requests="", **nano))
    yield Case("sparse_attention", dict(requests="0+1", **nano))
    yield Case("sparse_attention", dict(requests="0+3,127+1,300+6", **nano))
    yield Case("sparse_attention", dict(requests="120+33", **{**nano, "storage": "flat", "dtype": "f32"}))
    yield Case("sparse_attention", dict(requests="126+4,0+0,133+2", **{**nano, "k": 0}))
    yield Case("sparse_attention", dict(requests="200+5,3+4", **nano, count=6, padding=32, skip=4))
    yield Case("sparse_attention", dict(requests="140+3,5+2", **{**nano, "compressed": "fp8_32", "block_rows": 128}))
    exact = {**nano, "window": "f32", "compressed": "f32", "dtype": "f32"}
    yield Case("sparse_attention", dict(requests="140+3,5+2", **exact))
    yield Case("sparse_attention", dict(requests="700+2,130+1", **{**nano, "heads": 64, "k": 512}))
    decoded = {**nano, "window": "bf16", "compressed": "bf16", "storage": "flat"}
    yield Case("sparse_attention", dict(requests="140+3,5+2", **decoded, count=4))
    yield Case("sparse_attention", dict(requests="700+2,130+1", **{**decoded, "heads": 64, "k": 512}))
    # More rows than a GPU of 132 multiprocessors has pairs of them: a kernel may take another way from there on.
    yield Case("sparse_attention", dict(requests="90+75,3+5", **{**nano, "k": 8}))
    # A prompt's rows, which read each stored row many times: a kernel may expand all of those first.
    yield Case("sparse_attention", dict(requests="70+510,3+5", **{**nano, "k": 8, "storage": "flat"}))


def generate(case, seed, device, prepare) -> dict:
    p = {"count": None, "padding": 0, "skip": 0, **case.params}
    g, requests = generator(case, seed), cases.parse_requests(p["requests"])
    positions, row_to_req, _ = cases.token_rows(requests)
    if p["skip"]:
        row_to_req[p["skip"] - 1 :: p["skip"]] = -1
    shape = (positions.shape[0], p["heads"], p["D"])
    args = dict(q=cases.values(g, shape, p["dtype"], p["padding"]))
    args.update(make_window(g, requests, p["window"], p["D"], 128, p["storage"]))
    args.update(make_selection(g, requests, p))
    args.update(
        row_to_req=row_to_req,
        positions=positions,
        sink=cases.values(g, (p["heads"],)),
        scale=p["D"] ** -0.5,
        window_tokens=128,
        count=count_tensor(p["count"]),
        out=poisoned(*shape, dtype=dtype_of(p["dtype"])),
    )
    return cases.on(device, {name: args[name] for name in CARD.arg_names})


def make_window(g, requests, format: str, width: int, window_tokens: int, storage: str) -> dict:
    """Window store and its int32 [R] description; only rows that a query may read are written, the rest is poison.

    ring: one ring a request, in shuffled order. flat: the rows of a request one after the other, from an origin on.
    """
    count, first = len(requests), [max(0, p - window_tokens + 1) for p, _ in requests]
    longest = max([p + n - f for (p, n), f in zip(requests, first, strict=True)], default=1)
    ring = max(window_tokens + 6, longest)
    base = torch.randperm(count, generator=g).to(torch.int32) * ring
    origin = cases.ints(first) if storage == "flat" else torch.zeros(count, dtype=torch.int32)
    modulo = torch.full((count,), ring, dtype=torch.int32)
    cache = cases.empty_cache(max(count, 1) * ring, format, width, 0)
    last = cases.ints([p + n - 1 for p, n in requests]).long()
    slots = window_slots(cases.ints(first).long(), last, base.long(), origin.long(), modulo.long())
    cases.fill_rows(g, cache, slots.flatten(), format, width, 0)
    return dict(
        window=cache, window_base=base, window_origin=origin, window_modulo=modulo, window_format=format
    )


def make_selection(g, requests, p: dict) -> dict:
    """Compressed cache (ratio 1), shuffled block table and, per row, up to k ascending rows; unused rows are poison."""
    k, block_rows, format, width = p["k"], p["block_rows"], p["compressed"], p["D"]
    if k == 0:
        none = dict(compressed=None, block_table=None, rows=None)
        return {**none, "compressed_format": format, "block_rows": block_rows}
    per_request = max([(first + n - 1) // block_rows + 1 for first, n in requests], default=1)
    blocks = torch.randperm(max(len(requests), 1) * per_request, generator=g).to(torch.int32)
    table = blocks.reshape(-1, per_request)[: len(requests)]
    positions, row_to_req, _ = cases.token_rows(requests)
    rows = torch.full((positions.shape[0], k), -1, dtype=torch.int32)
    for t, position in enumerate(positions.tolist()):
        chosen = torch.randperm(position + 1, generator=g)[: max(k - 3 * (t % 2), 0)].sort().values
        rows[t, : chosen.shape[0]] = chosen.to(torch.int32)
    cache = cases.empty_cache(blocks.shape[0], format, width, block_rows, gap=64)
    everyone = torch.arange(positions.shape[0])
    used = selected_slots(rows, everyone, row_to_req.long(), table, block_rows) if len(requests) else rows
    cases.fill_rows(g, cache, used.flatten(), format, width, block_rows)
    return dict(compressed=cache, block_table=table, rows=rows, compressed_format=format, block_rows=block_rows)


def tolerance(args, name):
    keys = args["window_tokens"] + (0 if args["rows"] is None else args["rows"].shape[1])
    return sum_tolerance(args["out"].dtype, args["q"].shape[-1] + keys, magnitude=4.0)


def cost(args) -> Cost:
    """Every distinct stored key of a request read once; two products of D per head and key that a row has."""
    heads, width = args["q"].shape[1:]
    live = (args["row_to_req"] >= 0) & (args["positions"] >= 0)
    request, last = args["row_to_req"][live].long(), args["positions"][live].long()
    first = torch.maximum((last - args["window_tokens"] + 1).clamp_min(0), args["window_origin"].long()[request])
    keys = int((last - first + 1).sum())
    distinct = int(torch.unique(request * (1 << 32) + last).numel())
    for r in torch.unique(request):
        distinct += int(last[request == r].min() - first[request == r].min())
    stored = distinct * block_bytes(args["window_format"], width, 1)
    if args["rows"] is not None:
        row = args["rows"][live].long()
        chosen = row >= 0
        keys += int(chosen.sum())
        distinct = torch.unique((request[:, None] * (1 << 32) + row)[chosen]).numel()
        stored += distinct * block_bytes(args["compressed_format"], width, 1)
    return Cost(2 * args["q"].numel() * args["q"].element_size() + stored, 4 * heads * width * keys)


def check(args) -> None:
    width = args["q"].shape[-1]
    check_cache("sparse_attention", "window", args["window"], args["window_format"], width, 0)
    check_selection("sparse_attention", args, width)


def check_selection(op: str, args, width: int) -> None:
    """BadCall where rows are selected without a cache that they may lie in."""
    if args["rows"] is None:
        return
    if args["compressed"] is None or args["block_table"] is None or args["block_rows"] < 1:
        raise BadCall(f"{op}: rows are given, so compressed, block_table and block_rows >= 1 are needed")
    check_cache(op, "compressed", args["compressed"], args["compressed_format"], width, args["block_rows"])


CARD = register(
    OpCard(
        name="sparse_attention",
        group="attention",
        summary="Shared-KV attention over window and selected compressed rows, with a sink.",
        signature=(
            tensor("q", "stream", "T h D"),
            tensor("window", "u8", "N _"),
            tensor("window_base", "i32", "R"),
            tensor("window_origin", "i32", "R"),
            tensor("window_modulo", "i32", "R"),
            scalar("window_format", "str"),
            tensor("compressed", "u8", "B _", optional=True),
            tensor("block_table", "i32", "R _", optional=True),
            scalar("compressed_format", "str"),
            scalar("block_rows", "int"),
            tensor("rows", "i32", "T k", optional=True),
            tensor("row_to_req", "i32", "T"),
            tensor("positions", "i32", "T"),
            tensor("sink", "f32", "h"),
            scalar("scale", "float"),
            scalar("window_tokens", "int"),
            COUNT,
            out("out", "stream", "T h D"),
        ),
        reference=sparse_attention,
        rounding="float32 throughout, once to out's dtype",
        invariance="a row's bits depend on its own key list alone: pieces of 64 keys, merged left to right",
        reference_invariant="no",
        tolerance=tolerance,
        check=check,
        cost=cost,
        enumerate_cases=enumerate_cases,
        generate=generate,
    )
)
