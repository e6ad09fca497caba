"""stream_collapse: the weighted sum of the residual streams, out = sum_j pre[j] S_j (V4.1 notes 2.1, 2.2)."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, Tolerance, out, register, sum_tolerance, tensor
from deepinfer_hal.ops import _common as c


def stream_collapse(streams: torch.Tensor, pre: torch.Tensor, count: torch.Tensor | None, out: torch.Tensor) -> None:
    """streams [T, m, H], pre f32 [T, m] -> out [T, H]; summed in FP32 from stream 0 up, rounded once."""
    n = c.valid_rows(count, streams.shape[0])
    value = c.wide(pre[:n, 0, None]) * c.wide(streams[:n, 0])
    for j in range(1, streams.shape[1]):
        value = value + c.wide(pre[:n, j, None]) * c.wide(streams[:n, j])
    c.write_result(out, None, value)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, m=4, H=256, dtype="bf16"),
        dict(T=1, m=4, H=256, dtype="bf16"),
        dict(T=33, m=4, H=256, dtype="bf16", count=11),
        dict(T=33, m=4, H=64, dtype="f32"),
        dict(T=3, m=4, H=5120, dtype="bf16"),
    ]
    return [Case("stream_collapse", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    dtype = c.dtype_of(p["dtype"])
    return {
        "streams": c.normal(gen, p["T"], p["m"], p["H"], dtype=dtype, device=device),
        "pre": c.normal(gen, p["T"], p["m"], device=device).abs(),
        "count": c.count_tensor(p.get("count"), device),
        "out": c.poisoned(p["T"], p["H"], dtype=dtype, device=device),
    }


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    terms = c.largest(args["streams"]) * c.largest(args["pre"])
    return sum_tolerance(args["out"].dtype, args["streams"].shape[1], terms)


CARD = register(
    OpCard(
        name="stream_collapse",
        group="residual",
        summary="Weighted sum of the residual streams.",
        signature=(
            tensor("streams", "stream", "T m H"),
            tensor("pre", "f32", "T m"),
            COUNT,
            out("out", "stream", "T H"),
        ),
        reference=stream_collapse,
        rounding="FP32 sum from stream 0 up; one rounding to out's dtype",
        reference_invariant="yes",
        tolerance=_tolerance,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
