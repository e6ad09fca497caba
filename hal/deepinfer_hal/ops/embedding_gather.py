"""embedding_gather: token ids to rows of the embedding, copied to every residual stream (V4.1 notes, section 2.1).

out[t, j] = table[ids[t]] for all streams j; an id below 0 or not below V gives zeros. No scaling.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, tensor, weight
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._cost import touching, weight_rows_bytes
from deepinfer_hal.weights import WeightHandle


def embedding_gather(ids: torch.Tensor, table: WeightHandle, count: torch.Tensor | None, out: torch.Tensor) -> None:
    """ids i32 [T], table [V, H] -> out [T, m, H]."""
    n = c.valid_rows(count, ids.shape[0])
    inside = (ids[:n] >= 0) & (ids[:n] < table.shape[0])
    rows = c.weight_rows(table, ids[:n].where(inside, 0))
    c.write_result(out, None, rows.where(inside[:, None], 0.0)[:, None].expand(-1, out.shape[1], -1))


def _cases() -> list[Case]:
    rows = [
        dict(T=0, V=259, H=256, m=4, w="bf16", out="bf16"),
        dict(T=1, V=259, H=256, m=4, w="bf16", out="bf16"),
        dict(T=33, V=259, H=256, m=4, w="bf16", out="bf16", count=17),
        dict(T=33, V=259, H=64, m=1, w="f32", out="f32"),
        dict(T=3, V=500, H=5120, m=4, w="bf16", out="f32"),
    ]
    return [Case("embedding_gather", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    ids = c.integers(gen, 0, p["V"], p["T"], device=device)
    if p["T"] > 2:
        ids[0], ids[1], ids[2] = -1, p["V"], p["V"] - 1
    return {
        "ids": ids,
        "table": c.make_weight(prepare, "embed", p["w"], gen, p["V"], p["H"], device=device),
        "count": c.count_tensor(p.get("count"), device),
        "out": c.poisoned(p["T"], p["m"], p["H"], dtype=c.dtype_of(p["out"]), device=device),
    }


CARD = register(
    OpCard(
        name="embedding_gather",
        group="input",
        summary="Embedding rows of the token ids, copied to every residual stream.",
        signature=(
            tensor("ids", "i32", "T"),
            weight("table", "V H"),
            COUNT,
            out("out", "stream", "T m H"),
        ),
        reference=embedding_gather,
        rounding="the stored value, rounded once to out's dtype",
        enumerate_cases=_cases,
        generate=_generate,
        cost=touching(table=lambda args: weight_rows_bytes(args["table"], args["ids"].shape[0])),
    )
)
