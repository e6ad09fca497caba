"""hyper_connection_post: puts a sub-layer's result back into the streams (section 2.2 of the V4.1 notes, step 7).

S'_k = post[k] y + sum_i comb[i, k] S_i: the sum runs over the first index of comb.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, Tolerance, inout, register, sum_tolerance, tensor
from deepinfer_hal.ops import _common as c


def hyper_connection_post(
    y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, count: torch.Tensor | None, streams: torch.Tensor
) -> None:
    """y [T, H], post f32 [T, m], comb f32 [T, m, m]; streams [T, m, H] are updated in place, rounded once."""
    n = c.valid_rows(count, streams.shape[0])
    value = c.wide(post[:n, :, None]) * c.wide(y[:n, None])
    for i in range(streams.shape[1]):
        value = value + c.wide(comb[:n, i, :, None]) * c.wide(streams[:n, i, None])
    c.write_result(streams, None, value)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, m=4, H=256, dtype="bf16"),
        dict(T=1, m=4, H=256, dtype="bf16"),
        dict(T=33, m=4, H=256, dtype="bf16", count=11),
        dict(T=33, m=4, H=64, dtype="f32"),
        dict(T=3, m=4, H=5120, dtype="bf16"),
    ]
    return [Case("hyper_connection_post", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, m, dtype = p["T"], p["m"], c.dtype_of(p["dtype"])
    return {
        "y": c.normal(gen, rows, p["H"], dtype=dtype, device=device),
        "post": 2 * torch.rand(rows, m, generator=gen).to(device),
        "comb": torch.softmax(c.normal(gen, rows, m, m, device=device), dim=-1),
        "count": c.count_tensor(p.get("count"), device),
        "streams": c.normal(gen, rows, m, p["H"], dtype=dtype, device=device),
    }


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    terms = c.largest(args["y"]) * c.largest(args["post"]) + c.largest(args["streams"]) * c.largest(args["comb"])
    return sum_tolerance(args["streams"].dtype, args["streams"].shape[1] + 1, terms)


CARD = register(
    OpCard(
        name="hyper_connection_post",
        group="residual",
        summary="Mixes a sub-layer's result and the old streams into the new streams.",
        signature=(
            tensor("y", "stream", "T H"),
            tensor("post", "f32", "T m"),
            tensor("comb", "f32", "T m m"),
            COUNT,
            inout("streams", "stream", "T m H"),
        ),
        reference=hyper_connection_post,
        rounding="FP32 sum: post * y, then comb from stream 0 up; one rounding to the streams' dtype",
        reference_invariant="yes",
        tolerance=_tolerance,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
