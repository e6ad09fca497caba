"""markov_logits: the draft block's sequential term: what the previous token says (model notes, section 2.11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal.card import Case, OpCard, Tolerance, out, register, sum_tolerance, tensor, weight
from deepinfer_hal.ops._common import generator, integers, normal, poisoned, weight_rows, weight_values, wide
from deepinfer_hal.ops._cost import touching, weight_rows_bytes
from deepinfer_hal.weights import CanonicalWeight, WeightHandle


def markov_logits(
    base: torch.Tensor, prev: torch.Tensor, embed: WeightHandle, head: WeightHandle, out: torch.Tensor, mu: torch.Tensor
) -> None:
    """mu = embed[prev] rounded to mu's dtype; out = base + mu head^T. A prev outside the vocabulary gives mu = 0."""
    if base.shape[0] == 0:
        return
    valid = (prev >= 0) & (prev < embed.shape[0])
    rows = weight_rows(embed, torch.where(valid, prev, torch.zeros_like(prev)))
    mu.copy_(rows.masked_fill(~valid[:, None], 0.0))
    out.copy_(wide(base) + wide(mu) @ weight_values(head, mu).T)


def _tolerance(args: Mapping[str, Any], name: str) -> Tolerance:
    return sum_tolerance(args[name].dtype, args["mu"].shape[1] + 1, 4.0)


def _cases():
    for rows, vocab, rank in ((0, 64, 32), (1, 64, 32), (3, 2048, 32), (33, 2048, 32), (2, 8000, 256)):
        for dtype in ("bf16", "f32"):
            yield Case("markov_logits", {"R": rows, "V": vocab, "r": rank, "dtype": dtype})


def _generate(case, seed, device, prepare):
    rows, vocab, rank = (case.params[name] for name in ("R", "V", "r"))
    stream = torch.bfloat16 if case.params["dtype"] == "bf16" else torch.float32
    gen = generator(case, seed)
    prev = integers(gen, 0, vocab, rows, device=device)
    prev[2::5] = -1
    values = [normal(gen, vocab, rank, dtype=torch.bfloat16, device=device, scale=0.3) for _ in range(2)]
    return {
        "base": normal(gen, rows, vocab, device=device),
        "prev": prev,
        "embed": prepare("markov_embed", CanonicalWeight("bf16", values[0])),
        "head": prepare("markov_head", CanonicalWeight("bf16", values[1])),
        "out": poisoned(rows, vocab, dtype=torch.float32, device=device),
        "mu": poisoned(rows, rank, dtype=stream, device=device),
    }


CARD = register(
    OpCard(
        name="markov_logits",
        group="draft",
        summary="Draft logits given the previous token: base + embed[prev] head^T, and that embedding.",
        signature=(
            tensor("base", "f32", "R V"),
            tensor("prev", "i32", "R"),
            weight("embed", "V r"),
            weight("head", "V r"),
            out("out", "f32", "R V"),
            out("mu", "stream", "R r"),
        ),
        reference=markov_logits,
        rounding="mu once to its dtype; the product takes the rounded mu and accumulates in float32",
        reference_invariant="no",
        tolerance=_tolerance,
        enumerate_cases=_cases,
        generate=_generate,
        cost=touching(embed=lambda args: weight_rows_bytes(args["embed"], args["prev"].shape[0])),
    )
)
