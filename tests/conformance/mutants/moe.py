"""Experts: routing, moving rows to experts and back, the activation between."""

from __future__ import annotations

import torch
from deepinfer_hal.card import get_card

from tests.conformance.mutants._base import Args, Mutant, changed, kernel, spoiled, with_rows

ROUTE = "route_topk(T=9,E=8,k=2)"
ROUTE_TIES = "route_topk(T=9,E=8,k=2,ties=True)"
ROUTE_MAPPED = "route_topk(T=9,E=8,k=2,P=12)"
ROUTE_COUNTED = "route_topk(T=9,E=8,k=2,count=5)"
PERMUTE = "permute(T=9,K=64,E=4,k=2,x=bf16)"
UNPERMUTE = "unpermute(T=9,H=64,k=3,dtype=f32,shared=False,holes=True)"
UNPERMUTE_WHOLE = "unpermute(T=9,H=64,k=3,dtype=f32,shared=False)"
SWIGLU = "swiglu_quantise(M=9,I=64,x=f32,out=f32,weighed=True)"
DISPATCH = "ep_dispatch(T=9,K=64,E=8,k=2,x=bf16)"
COMBINE = "ep_combine(T=9,H=64,k=3,dtype=f32,weights=True)"
LAYER = "moe_layer(T=12,H=64,E=8,k=2,I=32,dtype=f32,codes=False)"


def biased_weights(args: Args) -> None:
    """The bias that balances the load also weighs."""
    x = args["logits"]
    score = torch.sqrt(torch.nn.functional.softplus(x)) + args["bias"]
    picked = score.gather(1, args["ids"].long())
    args["weights"].copy_(picked / picked.sum(1, keepdim=True) * args["scaling"])


def ties_upward(logits, bias, k, scaling, expert_map, count, ids, weights, counts) -> None:
    """Chooses among mirrored experts, so equal scores go to the higher id."""
    get_card("route_topk").reference(logits.flip(1), bias.flip(0), k, scaling, None, count, ids, weights, counts)
    ids.copy_(logits.shape[1] - 1 - ids)
    counts.copy_(counts.flip(0))


def map_ignored(args: Args) -> Args:
    return {"expert_map": None}


def counts_of_all_rows(logits, bias, k, scaling, expert_map, count, ids, weights, counts) -> None:
    get_card("route_topk").reference(logits, bias, k, scaling, expert_map, count, ids, weights, counts)
    whole = [t.clone() for t in (ids, weights)]
    get_card("route_topk").reference(logits, bias, k, scaling, expert_map, None, *whole, counts)


def unstable(args: Args) -> None:
    """Rows of one expert in reverse."""
    bounds = args["offsets"].tolist()
    rows = torch.arange(args["out"].shape[0])
    for start, stop in zip(bounds, bounds[1:], strict=False):
        rows[start:stop] = rows[start:stop].flip(0)
    args["out"].copy_(args["out"][rows])
    args["source"].copy_(args["source"][rows])
    args["inverse"].copy_(rows.argsort()[args["inverse"].long()])


def last_pair_lost(args: Args) -> Args:
    ids = args["ids"].clone()
    if ids.numel():
        ids[-1, -1] = -1
    return {"ids": ids}


def holes_read_row_zero(args: Args) -> Args:
    return {"inverse": args["inverse"].clamp_min(0)}


def in_order_of_arrival(rows, inverse, shared, count, out) -> None:
    """A token's rows in the order in which they lie, which the ids of all tokens decide."""
    get_card("unpermute").reference(rows, inverse.sort(dim=1).values, shared, count, out)


def upper_clamp_only(args: Args) -> Args:
    """The up part is clamped from above alone: what was below the limit counts as it is."""
    gate, up = args["gate_up"].chunk(2, dim=-1)
    return {"gate_up": torch.cat((gate.clamp(max=args["limit"]), up.clamp(max=args["limit"])), -1), "limit": float("inf")}


def gate_clamped_below(args: Args) -> Args:
    gate, up = args["gate_up"].chunk(2, dim=-1)
    return {"gate_up": torch.cat((gate.clamp(min=-2.0), up), -1)}


def weights_in_row_order(args: Args) -> Args:
    return {"source": torch.arange(args["source"].numel(), dtype=torch.int32)}


def weighed_twice(args: Args) -> Args:
    return {"weights": args["weights"] * args["weights"]}


def mutant(name, op, case, fn, killed_by, why, **more) -> Mutant:
    return Mutant(name, op, case, lambda: kernel(op, name, fn, **more), killed_by, why)


MUTANTS = [
    mutant("bias_in_the_weights", "route_topk", ROUTE, spoiled("route_topk", biased_weights), ("values",),
           "The router's bias chooses; here it weighs, too."),
    mutant("expert_tie_broken_upward", "route_topk", ROUTE_TIES, with_rows("route_topk", ties_upward), ("discrete",),
           "Of equal experts the higher id is chosen."),
    mutant("expert_map_ignored", "route_topk", ROUTE_MAPPED, changed("route_topk", map_ignored), ("discrete",),
           "Logical ids are given out where physical ones are wanted."),
    mutant("load_of_rows_past_the_count", "route_topk", ROUTE_COUNTED, with_rows("route_topk", counts_of_all_rows),
           ("discrete", "poison"),
           "Rows past the count are counted as load."),
    mutant("unstable_sort", "permute", PERMUTE, spoiled("permute", unstable), ("discrete",),
           "Rows of one expert do not keep the order of their tokens."),
    mutant("lost_pair", "permute", PERMUTE, changed("permute", last_pair_lost), ("discrete", "overwrite"),
           "The last token's last choice has no row."),
    mutant("hole_adds_row_zero", "unpermute", UNPERMUTE, changed("unpermute", holes_read_row_zero),
           ("values", "extremes", "paging"),
           "Index -1 adds the first row instead of nothing."),
    mutant("sum_in_order_of_arrival", "unpermute", UNPERMUTE_WHOLE, in_order_of_arrival, ("paging",),
           "A token's expert rows are added in the order in which they lie, which other tokens decide."),
    mutant("clamp_missing_below", "swiglu_quantise", SWIGLU, changed("swiglu_quantise", upper_clamp_only),
           ("values", "extremes"), "The up part is clamped from above only."),
    mutant("clamp_of_gate_too_many", "swiglu_quantise", SWIGLU, changed("swiglu_quantise", gate_clamped_below),
           ("values", "extremes"), "The gate is clamped from below, too."),
    mutant("weights_by_row", "swiglu_quantise", SWIGLU, changed("swiglu_quantise", weights_in_row_order),
           ("values", "extremes"), "A row takes the weight of its own number, not that of the pair it comes from."),
    mutant("dispatch_loses_a_token", "ep_dispatch", DISPATCH, changed("ep_dispatch", last_pair_lost), ("discrete", "overwrite"),
           "The last token's last choice is sent nowhere."),
    mutant("combine_weighs_twice", "ep_combine", COMBINE, changed("ep_combine", weighed_twice), ("values",),
           "The routing weight is applied where rows were sent from, and again where they come back."),
    mutant("layer_in_bf16", "moe_layer", LAYER, changed("moe_layer", lambda args: {"x": args["x"].bfloat16().float()}),
           ("values", "composites"), "The fused layer rounds its input, which its parts do not."),
]  # fmt: skip

