"""An expert-parallel MoE layer: moe_layer's parts, with the experts of a layer spread over ranks.

Every rank has its own tokens, the router and the shared expert, and experts rank * E .. (rank + 1) * E - 1 of world * E. The
bits are those of moe_layer on one rank: a row's products do not depend on the rows beside it, and ep_combine sums the
choices of a token in their order.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.communicator import Communicator
from deepinfer_hal.weights import WeightHandle


def moe_layer_over_ranks(
    comm: Communicator,
    parts: Any,
    most_tokens: int,
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
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """As moe_layer for this rank's x [T, H], with gate_up and down of this rank's experts alone. All ranks call it together.

    parts: the calls linear, route_topk, ep_dispatch, grouped_gemm, swiglu_quantise, ep_combine. most_tokens: T of no rank is
    larger; T may be 0. counts i32 [world * E]: this rank's choices. Raises what the two exchanges raise.
    """
    n, hidden, new, stream = x.shape[0], x.shape[1], x.new_empty, out.dtype
    experts, width, i32 = gate_up.shape[0], down.shape[2], torch.int32

    def room(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if x_codes is None:
            return new((rows, columns), dtype=stream), None
        return new((rows, columns), dtype=torch.uint8), new((rows, columns // 32), dtype=torch.uint8)

    logits = new((n, bias.shape[0]), dtype=torch.float32)
    ids, weights = new((n, k), dtype=i32), new((n, k), dtype=torch.float32)
    parts.linear(x, None, gate, None, logits, None)
    parts.route_topk(logits, bias, k, scaling, None, None, ids, weights, counts)
    dense, scales = (x, None) if x_codes is None else (x_codes, x_scales)

    most = comm.world_size * most_tokens * k
    (rows, row_scales), row_weights = room(most, hidden), new((most,), dtype=torch.float32)
    offsets, source, inverse = (new(size, dtype=i32) for size in ((experts + 1,), (most, 2), (n, k, 2)))
    parts.ep_dispatch(comm, dense, scales, ids, weights, experts, None, rows, row_scales, row_weights, offsets, source, inverse)
    received, in_order = offsets[experts:], torch.arange(most, dtype=i32, device=x.device)
    mid, (active, active_scales) = new((most, 2 * width), dtype=stream), room(most, width)
    parts.grouped_gemm(rows, row_scales, gate_up, offsets, mid, None)
    parts.swiglu_quantise(mid, row_weights, in_order, limit, received, active, active_scales)
    expert_out = new((most, hidden), dtype=stream)
    parts.grouped_gemm(active, active_scales, down, offsets, expert_out, None)

    shared_width = shared_down.shape[1]
    mid, (active, active_scales) = new((n, 2 * shared_width), dtype=stream), room(n, shared_width)
    shared = new((n, hidden), dtype=stream)
    parts.linear(dense, scales, shared_gate_up, None, mid, None)
    parts.swiglu_quantise(mid, None, None, limit, None, active, active_scales)
    parts.linear(active, active_scales, shared_down, None, shared, None)
    parts.ep_combine(comm, expert_out, received, source, inverse, None, shared, None, out)
