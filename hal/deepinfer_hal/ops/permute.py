"""permute: the rows of x, once per chosen expert, sorted by expert (the gather side of the MoE, V4.1 notes 2.9).

A stable counting sort of the (token, choice) pairs by expert id: equal experts keep the order t*k + j.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c


def permute(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    ids: torch.Tensor,
    experts: int,
    count: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    offsets: torch.Tensor,
    source: torch.Tensor,
    inverse: torch.Tensor,
) -> None:
    """x [T, K] (+ x_scale), ids i32 [T, k] -> out [T*k, K] (+ out_scale), offsets i32 [E+1], source i32 [T*k],
    inverse i32 [T, k].

    source[row] = t*k + j and inverse[t, j] = row; an id outside 0..experts-1 (-1) has no row and inverse -1. Rows of
    out and source from offsets[E] on, and rows of inverse past `count`, stay untouched.
    """
    n, k = c.valid_rows(count, ids.shape[0]), ids.shape[1]
    flat = ids[:n].reshape(-1).long()
    kept = (flat >= 0) & (flat < experts)
    order = torch.sort(flat.where(kept, experts), stable=True).indices[: int(kept.sum())]
    ends = torch.bincount(flat[kept], minlength=experts).cumsum(0)
    offsets[0] = 0
    offsets[1:] = ends.to(torch.int32)
    source[: order.numel()] = order.to(torch.int32)
    rows = torch.full((n * k,), -1, dtype=torch.int32, device=ids.device)
    rows[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    inverse[:n] = rows.view(n, k)
    out[: order.numel()] = x[order // k].to(out.dtype)
    if out_scale is not None:
        out_scale[: order.numel()] = x_scale[order // k]


def _cases() -> list[Case]:
    rows = [
        dict(T=0, K=256, E=8, k=2, x="bf16"),
        dict(T=1, K=256, E=8, k=2, x="u8"),
        dict(T=33, K=256, E=8, k=2, x="u8", count=21),
        dict(T=33, K=64, E=8, k=2, x="bf16", holes=True, strided=True),
        dict(T=3, K=64, E=384, k=6, x="f32"),
        dict(T=5, K=32, E=4, k=2, x="u8", holes="all"),
    ]
    return [Case("permute", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    tokens, k, width = p["T"], p["k"], p["K"]
    x, x_scale = c.normal(gen, tokens, width, device=device), None
    y, y_scale = c.poisoned_pair(tokens * k, width, device)
    if p["x"] == "u8":
        x, x_scale = c.quantised(x)
    else:
        x = x.to(c.dtype_of(p["x"]))
        y, y_scale = c.poisoned(tokens * k, width, dtype=x.dtype, device=device), None
    picks = [torch.randperm(p["E"], generator=gen)[:k] for _ in range(tokens)]
    ids = (torch.stack(picks) if picks else torch.zeros(0, k)).to(torch.int32)
    if p.get("holes"):
        ids[torch.rand(ids.shape, generator=gen) < (1.0 if p["holes"] == "all" else 0.3)] = -1
    i32 = torch.int32
    return {
        "x": c.strided(x) if p.get("strided") else x,
        "x_scale": x_scale,
        "ids": ids.to(device),
        "experts": p["E"],
        "count": c.count_tensor(p.get("count"), device),
        "out": y,
        "out_scale": y_scale,
        "offsets": c.poisoned(p["E"] + 1, dtype=i32, device=device),
        "source": c.poisoned(tokens * k, dtype=i32, device=device),
        "inverse": c.poisoned(tokens, k, dtype=i32, device=device),
    }


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("permute", args, ("x", "x_scale"), ("out", "out_scale"))
    if args["x"].dtype != args["out"].dtype:
        raise BadCall(f"permute: out must have x's dtype {args['x'].dtype}, got {args['out'].dtype}")


CARD = register(
    OpCard(
        name="permute",
        group="moe",
        summary="Copies each token's row once per chosen expert, sorted by expert.",
        signature=(
            tensor("x", "act", "T K"),
            tensor("x_scale", "u8", "T K/32", optional=True),
            tensor("ids", "i32", "T k"),
            scalar("experts", "int"),
            COUNT,
            out("out", "act", "T*k K"),
            out("out_scale", "u8", "T*k K/32", optional=True),
            out("offsets", "i32", "experts+1"),
            out("source", "i32", "T*k"),
            out("inverse", "i32", "T k"),
        ),
        reference=permute,
        rounding="none: rows are copied",
        invariance="a token's rows have its bits; where they lie depends on all valid tokens",
        empty="zero rows: offsets is all 0, nothing else is written",
        discrete=("out", "out_scale", "offsets", "source", "inverse"),
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
