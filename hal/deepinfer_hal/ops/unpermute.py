"""unpermute: adds each token's expert rows and the shared expert (the combine side of the MoE, V4.1 notes 2.9).

out[t] = (sum over j = 0 .. k-1 of rows[inverse[t, j]]) + shared[t], in FP32 in this order, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, Tolerance, out, register, sum_tolerance, tensor
from deepinfer_hal.ops import _common as c


def unpermute(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    shared: torch.Tensor | None,
    count: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """rows [M, H] (already weighed), inverse i32 [T, k], shared [T, H] -> out [T, H]; -1 adds nothing."""
    n = c.valid_rows(count, out.shape[0])
    value = torch.zeros(n, out.shape[1], dtype=c.work_dtype(rows), device=out.device)
    for j in range(inverse.shape[1]):
        valid = torch.nonzero(inverse[:n, j] >= 0).flatten()
        value[valid] += c.wide(rows[inverse[valid, j].long()])
    if shared is not None:
        value = value + c.wide(shared[:n])
    c.write_result(out, None, value)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, H=256, k=2, dtype="bf16", shared=True),
        dict(T=1, H=256, k=2, dtype="bf16", shared=True),
        dict(T=33, H=256, k=2, dtype="bf16", shared=True, count=13, holes=True),
        dict(T=33, H=64, k=2, dtype="f32", shared=False, holes=True),
        dict(T=3, H=5120, k=6, dtype="bf16", shared=True),
    ]
    return [Case("unpermute", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    tokens, k, hidden, dtype = p["T"], p["k"], p["H"], c.dtype_of(p["dtype"])
    inverse = torch.randperm(tokens * k, generator=gen).view(tokens, k).to(torch.int32)
    if p.get("holes"):
        inverse[torch.rand(inverse.shape, generator=gen) < 0.3] = -1
    return {
        "rows": c.normal(gen, tokens * k, hidden, dtype=dtype, device=device),
        "inverse": inverse.to(device),
        "shared": c.normal(gen, tokens, hidden, dtype=dtype, device=device) if p["shared"] else None,
        "count": c.count_tensor(p.get("count"), device),
        "out": c.poisoned(tokens, hidden, dtype=dtype, device=device),
    }


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    return sum_tolerance(args["out"].dtype, args["inverse"].shape[1] + 1, c.largest(args["rows"]))


CARD = register(
    OpCard(
        name="unpermute",
        group="moe",
        summary="Sums each token's expert rows, in the order of its choices, and the shared expert.",
        signature=(
            tensor("rows", "stream", "M H"),
            tensor("inverse", "i32", "T k"),
            tensor("shared", "stream", "T H", optional=True),
            COUNT,
            out("out", "stream", "T H"),
        ),
        reference=unpermute,
        rounding="FP32 sum in the order j = 0 .. k-1, then shared; one rounding to out's dtype",
        tolerance=_tolerance,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
