"""route_topk: the experts of each token and their weights (V4.1 notes, section 2.9).

u = sqrt(softplus(logit)), softplus(x) = x above 20. The k experts with the largest u + bias are chosen, in descending
order, ties to the lower id; weight = u / (sum of the chosen u + 1e-20) * scaling: the bias chooses and does not weigh.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, Tolerance, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c


def route_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    scaling: float,
    expert_map: torch.Tensor | None,
    count: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """logits f32 [T, E], bias f32 [E] -> ids i32 [T, k], weights f32 [T, k], counts i32 [P].

    expert_map i32 [E] renames the chosen experts (logical to physical, below P); -1 there drops the expert from ids and
    counts. `counts` is zeroed, then holds the valid rows' choices per physical expert.
    """
    n = c.valid_rows(count, logits.shape[0])
    x = c.wide(logits[:n])
    score = torch.sqrt(torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20)))))
    chosen = torch.sort(score + c.wide(bias), dim=-1, descending=True, stable=True).indices[:, :k]
    picked = score.gather(1, chosen)
    total = picked[:, 0]
    for j in range(1, k):
        total = total + picked[:, j]
    physical = chosen.to(torch.int32) if expert_map is None else expert_map[chosen]
    ids[:n] = physical
    c.write_result(weights, None, picked / (total + 1e-20)[:, None] * scaling)
    named = physical[physical >= 0].long()
    counts[:] = torch.bincount(named, minlength=counts.shape[0]).to(torch.int32)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, E=8, k=2),
        dict(T=1, E=8, k=2),
        dict(T=33, E=8, k=2, count=19),
        dict(T=3, E=384, k=6),
        dict(T=33, E=384, k=6, ties=True),
        dict(T=33, E=8, k=2, P=12),
        dict(T=4, E=8, k=8, big=True),
        dict(T=5, E=128, k=3, count=0),
    ]
    return [Case("route_topk", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, experts, physical = p["T"], p["E"], p.get("P", p["E"])
    logits = c.normal(gen, rows, experts, scale=40.0 if p.get("big") else 2.0)
    bias = c.normal(gen, experts, scale=0.1)
    if p.get("ties"):
        logits, bias = (logits * 2).round() / 2, torch.zeros(experts)
    expert_map = None
    if "P" in p:
        expert_map = torch.randperm(physical, generator=gen)[:experts].to(torch.int32).to(device)
        expert_map[experts // 2] = -1
    return {
        "logits": logits.to(device),
        "bias": bias.to(device),
        "k": p["k"],
        "scaling": 1.5,
        "expert_map": expert_map,
        "count": c.count_tensor(p.get("count"), device),
        "ids": c.poisoned(rows, p["k"], dtype=torch.int32, device=device),
        "weights": c.poisoned(rows, p["k"], dtype=torch.float32, device=device),
        "counts": c.poisoned(physical, dtype=torch.int32, device=device),
    }


def _check(args: dict[str, Any]) -> None:
    k, experts = args["k"], args["logits"].shape[1]
    if not 1 <= k <= experts or args["ids"].shape[1] != k:
        raise BadCall(f"route_topk: k = {k} must be in 1..{experts} and the width of ids, {args['ids'].shape[1]}")
    if args["expert_map"] is None and args["counts"].shape[0] != experts:
        raise BadCall(f"route_topk: without expert_map counts needs {experts} entries, got {args['counts'].shape[0]}")


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    return sum_tolerance(torch.float32, args["k"], args["scaling"])


CARD = register(
    OpCard(
        name="route_topk",
        group="moe",
        summary="Chooses k experts per token from sqrt-softplus scores plus a bias, and weighs them.",
        signature=(
            tensor("logits", "f32", "T E"),
            tensor("bias", "f32", "E"),
            scalar("k", "int"),
            scalar("scaling", "float"),
            tensor("expert_map", "i32", "E", optional=True),
            COUNT,
            out("ids", "i32", "T k"),
            out("weights", "f32", "T k"),
            out("counts", "i32", "P"),
        ),
        reference=route_topk,
        rounding="FP32 throughout",
        empty="zero rows: counts is zeroed, nothing else is written",
        invariance="a row's ids and weights depend on the row and the bias only",
        reference_invariant="unknown",
        tolerance=_tolerance,
        discrete=("ids", "counts"),
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
