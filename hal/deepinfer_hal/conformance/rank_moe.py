"""An expert-parallel MoE layer against the same layer on one rank: bit for bit, whatever the number of ranks.

Every rank has some tokens and some of the experts. Kernels that do not state batch invariance run one row at a time,
so that what is compared is the communication.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from deepinfer_hal.card import get_card
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.conformance.rank_jobs import I32, TOKENS, call, digest, same, seeded
from deepinfer_hal.conformance.rank_process import Rank
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.errors import Unsupported
from deepinfer_hal.expert_parallel import moe_layer_over_ranks
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
    """The layer for this rank's tokens, its experts also for those of others; the two exchanges are checked calls."""
    experts = EXPERTS // comm.world_size
    w = _weights(rank, comm.rank * experts, (comm.rank + 1) * experts)
    out, counts = torch.empty_like(x), torch.empty(EXPERTS, dtype=I32, device=x.device)

    def checked(op: str) -> Callable[..., Any]:
        return lambda *values: call(rank, op, **get_card(op).bind_args(values, {}))

    both = SimpleNamespace(**vars(parts), ep_dispatch=checked("ep_dispatch"), ep_combine=checked("ep_combine"))
    moe_layer_over_ranks(
        comm, both, most_tokens, x, *c.quantised(x), w["gate"], w["bias"], w["gate_up"], w["down"], w["shared_gate_up"],
        w["shared_down"], CHOICES, 1.5, LIMIT, out, counts,
    )  # fmt: skip
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
