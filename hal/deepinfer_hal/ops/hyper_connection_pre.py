"""hyper_connection_pre: the mixing coefficients of a sub-layer site and its input (section 2.2 of the V4.1 notes).

With f = flatten(S) in FP32:
z = (f fn^T) * rsqrt(mean(f^2) + rms_eps), then z * (scale0 | scale1 | scale2) + base;
pre = sigmoid(z[0:m]) + hc_eps, post = 2 sigmoid(z[m:2m]), comb = Sinkhorn(z[2m:] as [m, m]);
out = sum_j pre_prev[j] S_j: the input is mixed with the coefficients of the previous site.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, Tolerance, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._cost import mixing_cost
from deepinfer_hal.ops.stream_collapse import stream_collapse


def sinkhorn(logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """[..., m, m] logits to a nearly doubly stochastic matrix: row softmax + eps, then alternating normalisation.

    The first pass divides by the sums over the first index only; each later one by the second's, then the first's.
    """
    k = torch.softmax(logits, dim=-1) + eps
    k = k / (k.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        k = k / (k.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-2, keepdim=True) + eps)
    return k


def hyper_connection_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    pre_prev: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
    count: torch.Tensor | None,
    out: torch.Tensor,
    pre: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
) -> None:
    """streams [T, m, H], fn [(2+m)m, mH] -> out [T, H], pre and post f32 [T, m], comb f32 [T, m, m].

    `pre` may be the storage of `pre_prev`.
    """
    m = streams.shape[1]
    n = c.valid_rows(count, streams.shape[0])
    flat = c.wide(streams[:n]).flatten(1)
    z = torch.stack([c.row_sum(flat * row) for row in c.wide(fn)], dim=-1)
    z = z * torch.rsqrt(c.row_sum(flat * flat) / flat.shape[-1] + rms_eps)[:, None]
    spread = torch.cat([c.wide(scale)[i].expand(size) for i, size in enumerate((m, m, m * m))])
    z = z * spread + c.wide(base)
    stream_collapse(streams, pre_prev, count, out)
    c.write_result(pre, None, torch.sigmoid(z[:, :m]) + hc_eps)
    c.write_result(post, None, 2 * torch.sigmoid(z[:, m : 2 * m]))
    c.write_result(comb, None, sinkhorn(z[:, 2 * m :].unflatten(-1, (m, m)), hc_eps, iterations))


def _cases() -> list[Case]:
    rows = [
        dict(T=0, m=4, H=256, dtype="bf16"),
        dict(T=1, m=4, H=256, dtype="bf16"),
        dict(T=33, m=4, H=256, dtype="bf16", count=11),
        dict(T=33, m=4, H=64, dtype="f32"),
        dict(T=3, m=2, H=96, dtype="f32"),
        dict(T=3, m=4, H=5120, dtype="bf16"),
        dict(T=17, m=4, H=64, dtype="bf16", spread=40, hc_eps=1e-10),
    ]
    return [Case("hyper_connection_pre", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    """`spread`: of the logits; where it is large the Sinkhorn begins with rows that have nearly all in one column."""
    p, gen = case.params, c.generator(case, seed)
    rows, m, hidden = p["T"], p["m"], p["H"]
    dtype, f32, mixes = c.dtype_of(p["dtype"]), torch.float32, (2 + m) * m
    return {
        "streams": c.normal(gen, rows, m, hidden, dtype=dtype, device=device, scale=2.0),
        "fn": c.normal(gen, mixes, m * hidden, device=device, scale=(m * hidden) ** -0.5),
        "base": c.normal(gen, mixes, device=device),
        "scale": p.get("spread", 1) * (1 + c.normal(gen, 3, scale=0.2)).to(device),
        "pre_prev": c.normal(gen, rows, m, device=device).abs(),
        "rms_eps": 1e-20,
        "hc_eps": p.get("hc_eps", 1e-6),
        "iterations": 20,
        "count": c.count_tensor(p.get("count"), device),
        "out": c.poisoned(rows, hidden, dtype=dtype, device=device),
        "pre": c.poisoned(rows, m, dtype=f32, device=device),
        "post": c.poisoned(rows, m, dtype=f32, device=device),
        "comb": c.poisoned(rows, m, m, dtype=f32, device=device),
    }


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    if name == "out":
        terms = c.largest(args["streams"]) * c.largest(args["pre_prev"])
        return sum_tolerance(args["out"].dtype, args["streams"].shape[1], terms)
    # z is a normalised projection: |f|/rms is about 1, so its terms are about |fn|; the later maps have slope <= 1.
    width = args["streams"].shape[1] * args["streams"].shape[2]
    return sum_tolerance(torch.float32, width, 4 * c.largest(args["fn"]) * c.largest(args["scale"]))


CARD = register(
    OpCard(
        name="hyper_connection_pre",
        group="residual",
        summary="Coefficients of a hyper-connection site (pre, post, Sinkhorn comb) and the site's collapsed input.",
        signature=(
            tensor("streams", "stream", "T m H"),
            tensor("fn", "f32", "(2+m)*m m*H"),
            tensor("base", "f32", "(2+m)*m"),
            tensor("scale", "f32", "3"),
            tensor("pre_prev", "f32", "T m"),
            scalar("rms_eps", "float"),
            scalar("hc_eps", "float"),
            scalar("iterations", "int"),
            COUNT,
            out("out", "stream", "T H"),
            out("pre", "f32", "T m"),
            out("post", "f32", "T m"),
            out("comb", "f32", "T m m"),
        ),
        reference=hyper_connection_pre,
        rounding="FP32 throughout; out is rounded once to its dtype",
        reference_invariant="unknown",
        tolerance=_tolerance,
        enumerate_cases=_cases,
        generate=_generate,
        cost=mixing_cost,
    )
)
