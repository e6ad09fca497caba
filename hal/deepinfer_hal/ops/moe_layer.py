"""moe_layer (composite): router, experts and shared expert of one layer (V4.1 notes, section 2.9).

By default the sequence linear (gate), route_topk, permute, grouped_gemm, swiglu_quantise, grouped_gemm, the shared
expert's linear, swiglu_quantise, linear, and unpermute. An override must keep its rounding points.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, Cost, OpCard, Tolerance, default_cost, out, register, scalar, tensor, weight
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops.grouped_gemm import grouped_gemm
from deepinfer_hal.ops.linear import linear
from deepinfer_hal.ops.permute import permute
from deepinfer_hal.ops.route_topk import route_topk
from deepinfer_hal.ops.swiglu_quantise import swiglu_quantise
from deepinfer_hal.ops.unpermute import unpermute
from deepinfer_hal.weights import WeightHandle

_REFERENCES = SimpleNamespace(
    linear=linear, route_topk=route_topk, permute=permute, grouped_gemm=grouped_gemm, swiglu_quantise=swiglu_quantise,
    unpermute=unpermute,
)  # fmt: skip


def moe_layer(
    x: torch.Tensor,
    x_codes: torch.Tensor | None,
    x_scales: torch.Tensor | None,
    gate: WeightHandle,
    bias: torch.Tensor,
    gate_up: WeightHandle,
    down: WeightHandle,
    shared_gate_up: WeightHandle,
    shared_down: WeightHandle,
    k: int,
    scaling: float,
    limit: float,
    count: torch.Tensor | None,
    out: torch.Tensor,
    counts: torch.Tensor,
    *,
    parts: Any = _REFERENCES,
) -> None:
    """x [T, H] (+ x_codes [T, H], x_scales [T, H/32]) -> out [T, H], counts i32 [E] (choices per expert).

    The router reads x; experts read the codes if given, and then quantise their mid activation too.
    """
    n, hidden = x.shape
    experts, width = gate.shape[0], down.shape[2]
    new, stream = x.new_empty, out.dtype
    logits = new((n, experts), dtype=c.work_dtype(x))
    ids, weights = new((n, k), dtype=torch.int32), new((n, k), dtype=c.work_dtype(x))
    parts.linear(x, None, gate, count, logits, None)
    parts.route_topk(logits, bias, k, scaling, None, count, ids, weights, counts)
    dense, scales = (x, None) if x_codes is None else (x_codes, x_scales)

    def room(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if x_codes is None:
            return new((rows, columns), dtype=stream), None
        return new((rows, columns), dtype=torch.uint8), new((rows, columns // 32), dtype=torch.uint8)

    rows, row_scales = room(n * k, hidden)
    offsets, source, inverse = (new(size, dtype=torch.int32) for size in ((experts + 1,), (n * k,), (n, k)))
    parts.permute(dense, scales, ids, experts, count, rows, row_scales, offsets, source, inverse)
    mid, (active, active_scales) = new((n * k, 2 * width), dtype=stream), room(n * k, width)
    parts.grouped_gemm(rows, row_scales, gate_up, offsets, mid, None)
    parts.swiglu_quantise(mid, weights.view(-1), source, limit, offsets[experts:], active, active_scales)
    expert_out = new((n * k, hidden), dtype=stream)
    parts.grouped_gemm(active, active_scales, down, offsets, expert_out, None)
    shared_width = shared_down.shape[1]
    mid, (active, active_scales) = new((n, 2 * shared_width), dtype=stream), room(n, shared_width)
    shared_out = new((n, hidden), dtype=stream)
    parts.linear(dense, scales, shared_gate_up, count, mid, None)
    parts.swiglu_quantise(mid, None, None, limit, count, active, active_scales)
    parts.linear(active, active_scales, shared_down, count, shared_out, None)
    parts.unpermute(expert_out, inverse, shared_out, count, out)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, H=256, E=8, k=2, I=128, dtype="bf16", codes=True),
        dict(T=1, H=256, E=8, k=2, I=128, dtype="bf16", codes=True),
        dict(T=33, H=256, E=8, k=2, I=128, dtype="bf16", codes=True, count=21),
        dict(T=33, H=256, E=8, k=2, I=128, dtype="bf16", codes=False),
        dict(T=12, H=64, E=8, k=2, I=32, dtype="f32", codes=False),
        dict(T=3, H=64, E=384, k=6, I=32, dtype="bf16", codes=True),
    ]
    return [Case("moe_layer", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, hidden, experts, width = p["T"], p["H"], p["E"], p["I"]
    dtype = c.dtype_of(p["dtype"])
    x = c.normal(gen, rows, hidden, dtype=dtype, device=device)
    codes, scales = c.quantised(x) if p["codes"] else (None, None)
    plain = "f32" if p["dtype"] == "f32" else "bf16"
    routed, shared = (plain, plain) if plain == "f32" else ("fp4_row32", "fp8_block32")

    def handle(role: str, fmt: str, *shape: int) -> WeightHandle:
        return c.make_weight(prepare, role, fmt, gen, *shape, device=device)

    return {
        "x": x,
        "x_codes": codes,
        "x_scales": scales,
        "gate": handle("gate", plain, experts, hidden),
        "bias": c.normal(gen, experts, device=device, scale=0.1),
        "gate_up": handle("experts_gate_up", routed, experts, 2 * width, hidden),
        "down": handle("experts_down", routed, experts, hidden, width),
        "shared_gate_up": handle("shared_gate_up", shared, 2 * width, hidden),
        "shared_down": handle("shared_down", shared, hidden, width),
        "k": p["k"],
        "scaling": 1.5,
        "limit": 10.0,
        "count": c.count_tensor(p.get("count"), device),
        "out": c.poisoned(rows, hidden, dtype=dtype, device=device),
        "counts": c.poisoned(experts, dtype=torch.int32, device=device),
    }


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    """`out` of args must hold a result: its largest value is the unit of what intermediates contribute.

    An intermediate of the stream dtype may round the other way (half an eps of a term); with codes, a few mid values
    may move by a step of 1/8 of themselves, diluted by the sum over I.
    """
    eps, eps32 = torch.finfo(args["out"].dtype).eps, torch.finfo(torch.float32).eps
    flips = 0.0 if args["x_codes"] is None else 0.01
    rounded = eps / 2 if eps > eps32 else 0.0
    return Tolerance(rtol=2 * eps, atol=(rounded + 16 * eps32 + flips) * c.largest(args["out"]))


def _cost(args: dict[str, Any]) -> Cost:
    """As many experts read as the rows can choose at most, everything else once."""
    rows, hidden = args["x"].shape
    experts = args["bias"].shape[0]
    idle = max(experts - rows * args["k"], 0)
    unread = idle * (args["gate_up"].nbytes + args["down"].nbytes) // max(experts, 1)
    routed = 6 * args["k"] * args["down"].shape[2] + 6 * args["shared_down"].shape[1] + 2 * args["gate"].shape[0]
    return Cost(default_cost(args).bytes - unread, rows * hidden * routed)


CARD = register(
    OpCard(
        name="moe_layer",
        group="moe",
        summary="Router, routed experts and shared expert of a layer.",
        signature=(
            tensor("x", "stream", "T H"),
            tensor("x_codes", "u8", "T H", optional=True),
            tensor("x_scales", "u8", "T H/32", optional=True),
            weight("gate", "E H"),
            tensor("bias", "f32", "E"),
            weight("gate_up", "E 2*I H"),
            weight("down", "E H I"),
            weight("shared_gate_up", "2*J H"),
            weight("shared_down", "H J"),
            scalar("k", "int"),
            scalar("scaling", "float"),
            scalar("limit", "float"),
            COUNT,
            out("out", "stream", "T H"),
            out("counts", "i32", "E"),
        ),
        reference=moe_layer,
        rounding="FP32 router; gate_up and expert rows in the stream dtype; mid fp8_32 iff codes are given; out once",
        empty="zero rows: counts is zeroed, nothing else is written",
        invariance="a row's bits depend on the row and the weights only",
        reference_invariant="no",
        tolerance=_tolerance,
        discrete=("counts",),
        check=lambda args: c.check_pairs("moe_layer", args, ("x_codes", "x_scales")),
        enumerate_cases=_cases,
        generate=_generate,
        cost=_cost,
        decomposition=("linear", "route_topk", "permute", "grouped_gemm", "swiglu_quantise", "unpermute"),
    )
)
