"""residual_site (composite): everything between two sub-layers (V4.1 notes, section 2.2).

By default hyper_connection_post of the previous sub-layer's result (if there is one), hyper_connection_pre, and
rms_norm with its optional codes. An override must keep the rounding points.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, Cost, OpCard, Tolerance, inout, out, register, scalar, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._cost import mixing_cost
from deepinfer_hal.ops.hyper_connection_post import hyper_connection_post
from deepinfer_hal.ops.hyper_connection_pre import hyper_connection_pre
from deepinfer_hal.ops.rms_norm import rms_norm

_REFERENCES = SimpleNamespace(
    hyper_connection_post=hyper_connection_post, hyper_connection_pre=hyper_connection_pre, rms_norm=rms_norm
)


def residual_site(
    y: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    pre_prev: torch.Tensor,
    norm_weight: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
    count: torch.Tensor | None,
    streams: torch.Tensor,
    out: torch.Tensor,
    out_codes: torch.Tensor | None,
    out_scales: torch.Tensor | None,
    pre: torch.Tensor,
    post_out: torch.Tensor,
    comb_out: torch.Tensor,
    *,
    parts: Any = _REFERENCES,
) -> None:
    """y [T, H] with post [T, m] and comb [T, m, m] of its site (or None three times), streams [T, m, H] updated
    -> out [T, H] (normed input of the next sub-layer), its codes, and this site's pre, post_out and comb_out.

    post_out may be the storage of post, comb_out that of comb, and pre that of pre_prev.
    """
    if y is not None:
        parts.hyper_connection_post(y, post, comb, count, streams)
    mixed = torch.empty_like(out)
    parts.hyper_connection_pre(
        streams, fn, base, scale, pre_prev, rms_eps, hc_eps, iterations, count, mixed, pre, post_out, comb_out
    )
    parts.rms_norm(mixed, norm_weight, rms_eps, count, out, out_codes, out_scales)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, m=4, H=256, dtype="bf16", codes=True),
        dict(T=1, m=4, H=256, dtype="bf16", codes=True),
        dict(T=33, m=4, H=256, dtype="bf16", codes=True, count=13),
        dict(T=33, m=4, H=64, dtype="f32", codes=False),
        dict(T=33, m=4, H=64, dtype="f32", codes=False, first=True),
        dict(T=3, m=4, H=5120, dtype="bf16", codes=True, alias=True),
    ]
    return [Case("residual_site", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, m, hidden, dtype = p["T"], p["m"], p["H"], c.dtype_of(p["dtype"])
    f32, mixes = torch.float32, (2 + m) * m
    y = post = comb = None
    if not p.get("first"):
        y = c.normal(gen, rows, hidden, dtype=dtype, device=device)
        post = 2 * torch.rand(rows, m, generator=gen).to(device)
        comb = torch.softmax(c.normal(gen, rows, m, m, device=device), dim=-1)
    codes, scales = c.poisoned_pair(rows, hidden, device) if p["codes"] else (None, None)
    fresh = not p.get("alias")
    return {
        "y": y,
        "post": post,
        "comb": comb,
        "fn": c.normal(gen, mixes, m * hidden, device=device, scale=(m * hidden) ** -0.5),
        "base": c.normal(gen, mixes, device=device),
        "scale": (1 + c.normal(gen, 3, scale=0.2)).to(device),
        "pre_prev": torch.rand(rows, m, generator=gen).to(device) + 0.1,
        "norm_weight": (1 + c.normal(gen, hidden, scale=0.1)).to(dtype).to(device),
        "rms_eps": 1e-20,
        "hc_eps": 1e-6,
        "iterations": 20,
        "count": c.count_tensor(p.get("count"), device),
        "streams": c.normal(gen, rows, m, hidden, dtype=dtype, device=device),
        "out": c.poisoned(rows, hidden, dtype=dtype, device=device),
        "out_codes": codes,
        "out_scales": scales,
        "pre": c.poisoned(rows, m, dtype=f32, device=device),
        "post_out": c.poisoned(rows, m, dtype=f32, device=device) if fresh else post,
        "comb_out": c.poisoned(rows, m, m, dtype=f32, device=device) if fresh else comb,
    }


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("residual_site", args, ("out_codes", "out_scales"))
    given = [name for name in ("y", "post", "comb") if args[name] is not None]
    if given and len(given) < 3:
        raise BadCall(f"residual_site: y, post and comb go together; only {', '.join(given)} given")


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    """The streams, and then the mixed input, may round the other way: one eps each, seen again by what follows.

    Codes are made from `out`, so what it may be off by moves them too.
    """
    eps = torch.finfo(args["streams"].dtype).eps
    eps32 = torch.finfo(torch.float32).eps
    size = c.largest(args["streams"]) + (0.0 if args["y"] is None else c.largest(args["y"]))
    if name in ("streams", "out", "out_codes"):
        return Tolerance(rtol=2 * eps, atol=(0.25 * eps + 16 * eps32) * size)
    # A few flipped roundings move the FP32 coefficients by their share of the projection.
    return Tolerance(rtol=4 * eps32 + 0.02 * eps, atol=64 * eps32 + 0.02 * eps)


def _cost(args: dict[str, Any]) -> Cost:
    """Streams are written as well as read when a sub-layer's result is added to them."""
    once = mixing_cost(args)
    streams = 0 if args["y"] is None else args["streams"].nbytes
    return Cost(once.bytes + streams, once.flops)


CARD = register(
    OpCard(
        name="residual_site",
        group="residual",
        summary="Streams update, next site's coefficients and collapsed input, norm and quantisation, in one.",
        signature=(
            tensor("y", "stream", "T H", optional=True),
            tensor("post", "f32", "T m", optional=True),
            tensor("comb", "f32", "T m m", optional=True),
            tensor("fn", "f32", "(2+m)*m m*H"),
            tensor("base", "f32", "(2+m)*m"),
            tensor("scale", "f32", "3"),
            tensor("pre_prev", "f32", "T m"),
            tensor("norm_weight", "float", "H"),
            scalar("rms_eps", "float"),
            scalar("hc_eps", "float"),
            scalar("iterations", "int"),
            COUNT,
            inout("streams", "stream", "T m H"),
            out("out", "stream", "T H"),
            out("out_codes", "u8", "T H", optional=True),
            out("out_scales", "u8", "T H/32", optional=True),
            out("pre", "f32", "T m"),
            out("post_out", "f32", "T m"),
            out("comb_out", "f32", "T m m"),
        ),
        reference=residual_site,
        rounding="streams, the mixed input and the normed output to the stream dtype; codes from the normed output",
        reference_invariant="unknown",
        tolerance=_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
        cost=_cost,
        decomposition=("hyper_connection_post", "hyper_connection_pre", "rms_norm"),
    )
)
