"""An expert-parallel MoE layer against the same layer on one rank: bit for bit, whatever the number of ranks.

Every rank has some tokens and some of the experts. Kernels that do not state batch invariance run one row at a time,
so that what is compared is the communication.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepinfer_hal.card import get_card
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.conformance.rank_jobs import I32, TOKENS, call, digest, same, seeded
from deepinfer_hal.conformance.rank_process import Rank
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.errors import Unsupported
from deepinfer_hal.ops import _common as c
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, prepare_canonical

EXPERTS, CHOICES, HIDDEN, WIDTH = 8, 2, 256, 128
LIMIT = 10.0


def moe_layer(rank: Rank) -> dict[str, Any]:
    """Twice over ranks and once on this rank alone, for the tokens of all ranks; this rank's rows are compared."""
    parts = _parts(rank)
    with rank.open() as comm:
        loads = TOKENS[: comm.world_size]
        x = torch.randn(sum(loads), HIDDEN, generator=seeded(5)).bfloat16()
        whole, counts = _on_one_rank(rank, parts, x.to(rank.device))
        first = sum(loads[: comm.rank])
        mine = x[first : first + loads[comm.rank]].to(rank.device)
        runs = [_over_ranks(rank, parts, comm, mine, max(loads)) for _ in range(2)]
        for out in runs:
            same("out", out.cpu(), whole[first : first + loads[comm.rank]])
    return {"digest": digest(whole), "experts_used": int((counts > 0).sum())}


def _weights(rank: Rank, first: int = 0, last: int = EXPERTS) -> dict[str, WeightHandle | torch.Tensor]:
    """The layer's weights, of the experts first .. last-1."""
    gen = seeded(6)

    def handle(role: str, format: str, *shape: int) -> WeightHandle:
        stored = c.make_weight(prepare_canonical, role, format, gen, *shape).canonical()
        if len(shape) == 3:
            stored = CanonicalWeight(format, stored.values[first:last], stored.scales[first:last])
        scales = None if stored.scales is None else stored.scales.to(rank.device)
        return rank.backend.prepare_weight(rank.index, role, CanonicalWeight(format, stored.values.to(rank.device), scales))

    return {
        "gate": handle("gate", "bf16", EXPERTS, HIDDEN),
        "bias": (torch.randn(EXPERTS, generator=gen) * 0.1).to(rank.device),
        "gate_up": handle("experts_gate_up", "fp4_row32", EXPERTS, 2 * WIDTH, HIDDEN),
        "down": handle("experts_down", "fp4_row32", EXPERTS, HIDDEN, WIDTH),
        "shared_gate_up": handle("shared_gate_up", "fp8_block32", 2 * WIDTH, HIDDEN),
        "shared_down": handle("shared_down", "fp8_block32", HIDDEN, WIDTH),
    }


def _on_one_rank(rank: Rank, parts: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, counts = torch.empty_like(x), torch.empty(EXPERTS, dtype=I32, device=x.device)
    codes, scales = c.quantised(x)
    w = _weights(rank)
    get_card("moe_layer").reference(
        x, codes, scales, w["gate"], w["bias"], w["gate_up"], w["down"], w["shared_gate_up"], w["shared_down"], CHOICES, 1.5,
        LIMIT, None, out, counts, parts=parts,
    )  # fmt: skip
    return out.cpu(), counts.cpu()


def _over_ranks(rank: Rank, parts: Any, comm: Communicator, x: torch.Tensor, most_tokens: int) -> torch.Tensor:
    """The layer for this rank's tokens, its experts also for those of others: the parts of moe_layer between two exchanges."""
    experts, n = EXPERTS // comm.world_size, x.shape[0]
    w = _weights(rank, comm.rank * experts, (comm.rank + 1) * experts)
    codes, scales = c.quantised(x)

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    u8, f32 = torch.uint8, torch.float32
    logits, counts = new(n, EXPERTS, dtype=f32), new(EXPERTS, dtype=I32)
    ids, weights = new(n, CHOICES, dtype=I32), new(n, CHOICES, dtype=f32)
    parts.linear(x, None, w["gate"], None, logits, None)
    parts.route_topk(logits, w["bias"], CHOICES, 1.5, None, None, ids, weights, counts)

    room = comm.world_size * most_tokens * CHOICES
    rows, row_scales, row_weights = new(room, HIDDEN, dtype=u8), new(room, HIDDEN // 32, dtype=u8), new(room, dtype=f32)
    offsets, source, inverse = new(experts + 1, dtype=I32), new(room, 2, dtype=I32), new(n, CHOICES, 2, dtype=I32)
    call(
        rank, "ep_dispatch", comm=comm, x=codes, x_scale=scales, ids=ids, weights=weights, experts=experts, out=rows,
        out_scale=row_scales, out_weights=row_weights, offsets=offsets, source=source, inverse=inverse,
    )  # fmt: skip
    mid, active, active_scales = new(room, 2 * WIDTH), new(room, WIDTH, dtype=u8), new(room, WIDTH // 32, dtype=u8)
    received, in_order = offsets[experts:], torch.arange(room, dtype=I32, device=x.device)
    parts.grouped_gemm(rows, row_scales, w["gate_up"], offsets, mid, None)
    parts.swiglu_quantise(mid, row_weights, in_order, LIMIT, received, active, active_scales)
    expert_out = new(room, HIDDEN)
    parts.grouped_gemm(active, active_scales, w["down"], offsets, expert_out, None)

    mid, active, active_scales = new(n, 2 * WIDTH), new(n, WIDTH, dtype=u8), new(n, WIDTH // 32, dtype=u8)
    shared, out = new(n, HIDDEN), new(n, HIDDEN)
    parts.linear(codes, scales, w["shared_gate_up"], None, mid, None)
    parts.swiglu_quantise(mid, None, None, LIMIT, None, active, active_scales)
    parts.linear(active, active_scales, w["shared_down"], None, shared, None)
    call(
        rank, "ep_combine", comm=comm, rows=expert_out, received=received, source=source, inverse=inverse, shared=shared, out=out
    )
    return out


def _parts(rank: Rank) -> SimpleNamespace:
    """The backend's batch-invariant kernels of moe_layer's parts; where it has none, the reference, products row by row."""
    bound, row_by_row = {}, {"linear": _linear_rows, "grouped_gemm": _grouped_rows}
    dispatcher = Dispatcher(rank.backend, rank.index, batch_invariant=True)
    for op in get_card("moe_layer").decomposition:
        try:
            bound[op] = dispatcher.bind(op)
        except Unsupported:
            bound[op] = row_by_row.get(op, get_card(op).reference)
    return SimpleNamespace(**bound)


def _linear_rows(x: Any, x_scale: Any, weight: Any, count: Any, out: Any, out_scale: Any) -> None:
    for row in range(x.shape[0]):
        here = slice(row, row + 1)
        get_card("linear").reference(x[here], None if x_scale is None else x_scale[here], weight, None, out[here], None)


def _grouped_rows(x: Any, x_scale: Any, weight: Any, offsets: Any, out: Any, out_scale: Any) -> None:
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        _linear_rows(x[start:stop], x_scale[start:stop], weight.slot(expert), None, out[start:stop], None)
