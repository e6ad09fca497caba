"""engram_gate: adds the n-gram memory's value to each residual stream through a gate (V4.1 notes, section 2.10).

dot_j = sum(S_j qw_j kw_j k_j) rsqrt(mean S_j^2 + eps) rsqrt(mean k_j^2 + eps) H^-0.5;
gate_j = sigmoid(sign(dot_j) sqrt(max(|dot_j|, 1e-6))), sign(0) = 0; S_j += gate_j v.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, Tolerance, inout, register, scalar, sum_tolerance, tensor
from deepinfer_hal.ops import _common as c


def engram_gate(
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    count: torch.Tensor | None,
    streams: torch.Tensor,
) -> None:
    """kv [T, (m+1)H]: m keys, then the value; q_weight and k_weight [m, H]; streams [T, m, H] are updated in place."""
    m, hidden = q_weight.shape
    n = c.valid_rows(count, streams.shape[0])
    parts = c.wide(kv[:n]).unflatten(-1, (m + 1, hidden))
    keys, value, old = parts[:, :m], parts[:, m:], c.wide(streams[:n])
    dot = c.row_sum(old * c.wide(q_weight) * c.wide(k_weight) * keys)
    for norm in (old, keys):
        dot = dot * torch.rsqrt(c.row_sum(norm * norm) / hidden + eps)
    dot = dot * hidden**-0.5
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
    c.write_result(streams, None, old + gate[..., None] * value)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, m=4, H=256, dtype="bf16"),
        dict(T=1, m=4, H=256, dtype="bf16"),
        dict(T=33, m=4, H=256, dtype="bf16", count=12, strided=True),
        dict(T=33, m=4, H=64, dtype="f32"),
        dict(T=3, m=2, H=64, dtype="f32", zero_keys=True),
        dict(T=3, m=4, H=5120, dtype="bf16"),
    ]
    return [Case("engram_gate", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, m, hidden, dtype = p["T"], p["m"], p["H"], c.dtype_of(p["dtype"])
    kv = c.normal(gen, rows, (m + 1) * hidden, dtype=dtype, device=device)
    if p.get("zero_keys"):
        kv[:, : m * hidden] = 0
    return {
        "kv": c.strided(kv) if p.get("strided") else kv,
        "q_weight": (1 + c.normal(gen, m, hidden, scale=0.2)).to(dtype).to(device),
        "k_weight": (1 + c.normal(gen, m, hidden, scale=0.2)).to(dtype).to(device),
        "eps": 1e-20,
        "count": c.count_tensor(p.get("count"), device),
        "streams": c.normal(gen, rows, m, hidden, dtype=dtype, device=device),
    }


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    # The gate's argument has slope up to 1 / (2 sqrt(1e-6)) in dot near 0; dot itself is a normalised sum of H terms.
    hidden = args["q_weight"].shape[1]
    dot = sum_tolerance(torch.float32, hidden, 16 / hidden).atol
    value = c.largest(args["kv"])
    return Tolerance(rtol=sum_tolerance(args["streams"].dtype, 1).rtol, atol=value * (dot**0.5 / 4 + 1e-6))


CARD = register(
    OpCard(
        name="engram_gate",
        group="input",
        summary="Gates the n-gram memory's value into the residual streams.",
        signature=(
            tensor("kv", "stream", "T (m+1)*H"),
            tensor("q_weight", "stream", "m H"),
            tensor("k_weight", "stream", "m H"),
            scalar("eps", "float"),
            COUNT,
            inout("streams", "stream", "T m H"),
        ),
        reference=engram_gate,
        rounding="FP32 throughout; one rounding to the streams' dtype",
        reference_invariant="unknown",
        tolerance=_tolerance,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
