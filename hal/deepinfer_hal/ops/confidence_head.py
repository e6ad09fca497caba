"""confidence_head: how likely a draft is accepted, given that those before it were (model notes, section 2.11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal.card import Case, OpCard, Tolerance, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops._common import generator, normal, poisoned, row_sum, wide

LIMIT = 60.0


def confidence_head(
    raw: torch.Tensor,
    mu: torch.Tensor,
    weight: torch.Tensor,
    temperature: float,
    logit: torch.Tensor,
    probability: torch.Tensor,
) -> None:
    """logit = [raw ; mu] . weight (before the temperature); probability = sigmoid(clamp(logit / temperature, +-60)).

    raw is the draft block's output before its final norm.
    """
    if raw.shape[0] == 0:
        return
    joined = torch.cat([wide(raw), wide(mu)], dim=-1)
    value = row_sum(joined * wide(weight[0]))
    logit.copy_(value)
    scaled = (value / temperature).clamp(-LIMIT, LIMIT)
    # Whole vectors only: torch's exponential of a vector and of a remaining scalar differ in the last bit.
    padded = torch.nn.functional.pad(scaled, (0, -scaled.shape[0] % 64))
    probability.copy_(torch.sigmoid(padded)[: scaled.shape[0]])


def _check(args: Mapping[str, Any]) -> None:
    if not args["temperature"] > 0:
        raise BadCall(f"confidence_head: temperature must be positive, got {args['temperature']}")


def _tolerance(args: Mapping[str, Any], name: str) -> Tolerance:
    return sum_tolerance(torch.float32, args["weight"].shape[1], 1.0)


def _cases():
    for rows, hidden, rank in ((0, 256, 32), (1, 256, 32), (3, 5120, 256), (33, 256, 32)):
        for dtype in ("bf16", "f32"):
            yield Case("confidence_head", {"R": rows, "H": hidden, "r": rank, "dtype": dtype, "temperature": 1.5})


def _generate(case, seed, device, prepare):
    rows, hidden, rank = (case.params[name] for name in ("R", "H", "r"))
    stream = torch.bfloat16 if case.params["dtype"] == "bf16" else torch.float32
    gen = generator(case, seed)
    raw = normal(gen, rows, hidden, dtype=stream, device=device)
    raw[1::7] *= 100
    return {
        "raw": raw,
        "mu": normal(gen, rows, rank, dtype=stream, device=device),
        "weight": normal(gen, 1, hidden + rank, dtype=torch.bfloat16, device=device, scale=0.1),
        "temperature": case.params["temperature"],
        "logit": poisoned(rows, dtype=torch.float32, device=device),
        "probability": poisoned(rows, dtype=torch.float32, device=device),
    }


CARD = register(
    OpCard(
        name="confidence_head",
        group="draft",
        summary="Acceptance logit and probability of a draft from its hidden state and Markov embedding.",
        signature=(
            tensor("raw", "stream", "R H"),
            tensor("mu", "stream", "R r"),
            tensor("weight", "float", "1 H+r"),
            scalar("temperature", "float"),
            out("logit", "f32", "R"),
            out("probability", "f32", "R"),
        ),
        reference=confidence_head,
        rounding="none before the two float32 outputs",
        tolerance=_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
