"""attention_decode_layer (composite): the attention of a layer that makes no selection of its own, from its normed input.

By default the sequence linear (wq_a and wkv at once), rms_norm, linear (wq_b), rope, write_kv, sparse_attention, inverse
rope, quantise, grouped_linear (wo_a) and linear (wo_b) (V4.1 attention, section 2.4 of the model notes). Selected rows
come from an earlier index source. An override must keep its rounding points.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepinfer_hal.card import (
    COUNT,
    Case,
    Cost,
    OpCard,
    Tolerance,
    inout,
    out,
    register,
    scalar,
    tensor,
    weight,
)  # fmt: skip
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops import sparse_attention as sparse
from deepinfer_hal.ops.grouped_linear import grouped_linear
from deepinfer_hal.ops.linear import linear
from deepinfer_hal.ops.quantise import quantise
from deepinfer_hal.ops.rms_norm import rms_norm
from deepinfer_hal.ops.rope import rope
from deepinfer_hal.ops.write_kv import write_kv
from deepinfer_hal.row_layout import check_cache, code_bytes

_REFERENCES = SimpleNamespace(
    linear=linear, rms_norm=rms_norm, rope=rope, write_kv=write_kv, sparse_attention=sparse.sparse_attention,
    quantise=quantise, grouped_linear=grouped_linear,
)  # fmt: skip


def attention_decode_layer(
    x, x_scale, attn_in, q_norm, kv_norm, wq_b, sink, wo_a, wo_b, eps, positions, table, row_to_req, window_slots,
    window_base, window_origin, window_modulo, window_format, compressed, block_table, compressed_format, block_rows, rows,
    scale, window_tokens, count, window, out, *, parts: Any = _REFERENCES,
) -> None:  # fmt: skip
    """x [T, H] dense, or fp8_32 codes with x_scale [T, H/32]: then the query latent, the attention output and the output
    latent are quantised too. window uint8 [N, row_bytes] gets each row's new key at window_slots before it is attended.
    The remaining arguments are those of sparse_attention. out [T, H].
    """
    for format in (window_format, compressed_format):  # an unknown one is refused before the window is written
        code_bytes(format, kv_norm.shape[0])
    n = c.valid_rows(count, x.shape[0])
    quantised, new = x.dtype == torch.uint8, out.new_empty
    heads, width = sink.shape[0], kv_norm.shape[0]

    def valid(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.shape[0] == n else t[:n]

    x, x_scale, positions, row_to_req, rows = valid(x), valid(x_scale), valid(positions), valid(row_to_req), valid(rows)

    def room(columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not quantised:
            return new((n, columns)), None
        return new((n, columns), dtype=torch.uint8), new((n, columns // 32), dtype=torch.uint8)

    joined = new((n, attn_in.shape[0]))
    parts.linear(x, x_scale, attn_in, None, joined, None)
    lora = joined.shape[1] - width
    latent, latent_scale = room(lora)
    if quantised:
        parts.rms_norm(joined[:, :lora], q_norm, eps, None, None, latent, latent_scale)
    else:
        parts.rms_norm(joined[:, :lora], q_norm, eps, None, latent, None, None)
    query = new((n, heads * width))
    parts.linear(latent, latent_scale, wq_b, None, query, None)
    query = query.view(n, heads, width)
    parts.rope(positions, table, False, None, query)
    parts.write_kv(
        joined[:, lora:], kv_norm, eps, positions, table, valid(window_slots), window_format, 0, None, window, None
    )
    attended = torch.zeros_like(query)
    parts.sparse_attention(
        query, window, window_base, window_origin, window_modulo, window_format, compressed, block_table, compressed_format,
        block_rows, rows, row_to_req, positions, sink, scale, window_tokens, None, attended,
    )  # fmt: skip
    parts.rope(positions, table, True, None, attended)
    flat, flat_scale = attended.view(n, heads * width), None
    if quantised:
        codes, flat_scale = room(heads * width)
        parts.quantise(flat, "fp8_32", None, codes, flat_scale, None)
        flat = codes
    low, low_scale = room(wo_a.shape[0] * wo_a.shape[1])
    parts.grouped_linear(flat, flat_scale, wo_a, None, low, low_scale)
    parts.linear(low, low_scale, wo_b, None, valid(out), None)


def _cases() -> list[Case]:
    nano = dict(H=256, Q=64, heads=4, D=512, G=2, L=64, rope=64, k=64, block_rows=64, window="fp8_32", compressed="fp4_16")
    exact = {**nano, "window": "f32", "compressed": "f32"}
    rows = [
        dict(requests="", dtype="bf16", codes=True, **nano),
        dict(requests="0+1", dtype="bf16", codes=True, **nano),
        dict(requests="0+2,127+1,300+6", dtype="bf16", codes=True, **nano),
        dict(requests="200+1,3+1", dtype="bf16", codes=True, **{**nano, "k": 0}),
        dict(requests="200+3,3+2", dtype="bf16", codes=True, **nano, count=4),
        dict(requests="140+1,5+2", dtype="f32", codes=False, **exact),
    ]
    return [Case("attention_decode_layer", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p = {"count": None, "padding": 0, "skip": 0, **case.params}
    gen, requests = c.generator(case, seed), cases.parse_requests(p["requests"])
    positions, row_to_req, _ = cases.token_rows(requests)
    dtype, tokens = c.dtype_of(p["dtype"]), positions.shape[0]
    fp8 = "fp8_block32" if p["codes"] else "f32"
    x = c.normal(gen, tokens, p["H"], dtype=dtype)
    x, x_scale = c.quantised(x) if p["codes"] else (x, None)

    def handle(role: str, *shape: int):
        return c.make_weight(prepare, role, fp8, gen, *shape, device=device)

    args = dict(
        x=x, x_scale=x_scale, q_norm=1 + cases.values(gen, (p["Q"],)) * 0.1, kv_norm=1 + cases.values(gen, (p["D"],)) * 0.1,
        sink=cases.values(gen, (p["heads"],)), eps=1e-20, positions=positions, row_to_req=row_to_req,
        table=cases.rope_table(512, p["rope"]), scale=p["D"] ** -0.5, window_tokens=128, count=c.count_tensor(p["count"]),
        out=c.poisoned(tokens, p["H"], dtype=dtype),
    )  # fmt: skip
    args.update(sparse.make_window(gen, requests, p["window"], p["D"], 128, "ring"))
    args.update(sparse.make_selection(gen, requests, p))
    base, modulo = (args[name][row_to_req.long()] for name in ("window_base", "window_modulo"))
    args["window_slots"] = (base + positions % modulo).to(torch.int32)
    args = cases.on(device, args)
    args.update(
        attn_in=handle("attn_in", p["Q"] + p["D"], p["H"]), wq_b=handle("wq_b", p["heads"] * p["D"], p["Q"]),
        wo_a=handle("wo_a", p["G"], p["L"], p["heads"] * p["D"] // p["G"]), wo_b=handle("wo_b", p["H"], p["G"] * p["L"]),
    )  # fmt: skip
    return {name: args[name] for name in CARD.arg_names}


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    """`out` of args must hold a result: its largest value is the unit of what intermediates contribute.

    Intermediates may round the other way (half an eps of a term each); with codes, values may move by a step of 1/8 of
    themselves, diluted by the sums that follow.
    """
    eps, eps32 = torch.finfo(args["out"].dtype).eps, torch.finfo(torch.float32).eps
    if name == "window":  # normed keys, of the size of the norm's weight
        return Tolerance(rtol=2 * eps, atol=64 * eps32 * c.largest(args["kv_norm"]))
    flips = 0.02 if args["x"].dtype == torch.uint8 else 0.0
    rounded = 2 * eps if eps > eps32 else 0.0
    return Tolerance(rtol=2 * eps, atol=(rounded + 64 * eps32 + flips) * c.largest(args["out"]))


def _cost(args: dict[str, Any]) -> Cost:
    """Its weights and rows once, and the attention's own bytes and FLOPs."""
    tokens, heads, width = args["x"].shape[0], args["sink"].shape[0], args["kv_norm"].shape[0]
    query = args["out"].new_empty((tokens, heads, width))
    inner = sparse.cost({**args, "q": query})
    weights = [args[name] for name in ("attn_in", "wq_b", "wo_a", "wo_b")]
    products = sum(2 * w.shape[-2] * w.shape[-1] * (w.shape[0] if len(w.shape) == 3 else 1) for w in weights)
    stored = inner.bytes - 2 * query.numel() * query.element_size()
    moved = args["x"].numel() * args["x"].element_size() + args["out"].numel() * args["out"].element_size()
    return Cost(stored + moved + sum(w.nbytes for w in weights), inner.flops + tokens * products)


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("attention_decode_layer", args, ("x", "x_scale"))
    width = args["kv_norm"].shape[0]
    check_cache("attention_decode_layer", "window", args["window"], args["window_format"], width, 0)
    sparse.check_selection("attention_decode_layer", args, width)


CARD = register(
    OpCard(
        name="attention_decode_layer",
        group="attention",
        summary="Attention of a layer that reuses an earlier layer's selection: projections, keys, attention, output.",
        signature=(
            tensor("x", "act", "T H"),
            tensor("x_scale", "u8", "T H/32", optional=True),
            weight("attn_in", "A H"),
            tensor("q_norm", "float", "Q"),
            tensor("kv_norm", "float", "D"),
            weight("wq_b", "h*D Q"),
            tensor("sink", "f32", "h"),
            weight("wo_a", "G L _"),
            weight("wo_b", "H G*L"),
            scalar("eps", "float"),
            tensor("positions", "i32", "T"),
            tensor("table", "f32", "P r"),
            tensor("row_to_req", "i32", "T"),
            tensor("window_slots", "i32", "T"),
            tensor("window_base", "i32", "R"),
            tensor("window_origin", "i32", "R"),
            tensor("window_modulo", "i32", "R"),
            scalar("window_format", "str"),
            tensor("compressed", "u8", "B _", optional=True),
            tensor("block_table", "i32", "R _", optional=True),
            scalar("compressed_format", "str"),
            scalar("block_rows", "int"),
            tensor("rows", "i32", "T k", optional=True),
            scalar("scale", "float"),
            scalar("window_tokens", "int"),
            COUNT,
            inout("window", "u8", "N _"),
            out("out", "stream", "T H"),
        ),
        reference=attention_decode_layer,
        rounding="each projection in the stream dtype; with codes, query latent, attention output and output latent in fp8_32",
        invariance="a row's bits depend on its input, its own key list and the weights only",
        reference_invariant="no",
        tolerance=_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
        cost=_cost,
        decomposition=("linear", "rms_norm", "rope", "write_kv", "sparse_attention", "quantise", "grouped_linear"),
    )
)
