"""top_logprobs: log-probability and rank of the chosen token, and the k most probable tokens of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal.card import EXACT, Case, OpCard, Tolerance, out, register, tensor
from deepinfer_hal.ops._common import wide
from deepinfer_hal.ops._sampling import keep_top, random_logits


def top_logprobs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    chosen_logprob: torch.Tensor,
    chosen_rank: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """log_softmax of each row; rank 1 is the most probable token, ties to the lower id; k = ids.shape[1] may be 0.

    ids come most probable first. Tokens are ordered by their logits: rounding makes log-probabilities of different logits equal,
    and other ones with every order of the sum. chosen -1 leaves that row's log-probability NaN and its rank 0. k <= V.
    """
    rows, k = ids.shape
    if rows == 0:
        return
    logprobs = torch.log_softmax(wide(logits), dim=-1)
    broken = logprobs.isnan()  # all of a row's or none
    keys = wide(logits).masked_fill(broken, float("-inf"))
    picked = chosen.long().clamp(min=0)[:, None]
    own = keys.gather(-1, picked)
    columns = torch.arange(logits.shape[1], device=logits.device)
    better = ((keys > own) | ((keys == own) & (columns < picked))) & ~broken
    absent = chosen < 0
    chosen_logprob.copy_(logprobs.gather(-1, picked)[:, 0].masked_fill(absent, float("nan")))
    chosen_rank.copy_((better.sum(-1) + 1).masked_fill(absent, 0))
    if k == 0:
        return
    best = keep_top(keys, torch.full((rows,), k, device=logits.device)).nonzero()[:, 1].view(rows, k)
    order = keys.gather(-1, best).sort(dim=-1, descending=True, stable=True).indices
    ids.copy_(best.gather(-1, order))
    values.copy_(logprobs.masked_fill(broken, float("-inf")).gather(-1, ids.long()))


def _tolerance(args: Mapping[str, Any], name: str) -> Tolerance:
    """A log-sum-exp over V FP32 terms, then one subtraction of numbers up to the logits' size."""
    return Tolerance(rtol=1e-5, atol=1e-5) if name in ("chosen_logprob", "values") else EXACT


def _cases():
    for rows, vocab, k in ((0, 8, 2), (1, 1, 1), (3, 33, 0), (3, 33, 33), (33, 2048, 20), (2, 129280, 5)):
        yield Case("top_logprobs", {"S": rows, "V": vocab, "k": k})


def _generate(case, seed, device, prepare):
    rows, vocab, k = (case.params[name] for name in ("S", "V", "k"))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, vocab, (rows,), generator=generator, dtype=torch.int32)
    chosen[2::4] = -1
    return {
        "logits": random_logits(rows, vocab, seed, device),
        "chosen": chosen.to(device),
        "chosen_logprob": torch.full((rows,), float("nan"), device=device),
        "chosen_rank": torch.full((rows,), -7, dtype=torch.int32, device=device),
        "ids": torch.full((rows, k), -7, dtype=torch.int32, device=device),
        "values": torch.full((rows, k), float("nan"), device=device),
    }


CARD = register(
    OpCard(
        name="top_logprobs",
        group="sampling",
        summary="Log-softmax: the chosen token's log-probability and rank, and the k best tokens in order.",
        signature=(
            tensor("logits", "f32", "S V"),
            tensor("chosen", "i32", "S"),
            out("chosen_logprob", "f32", "S"),
            out("chosen_rank", "i32", "S"),
            out("ids", "i32", "S k"),
            out("values", "f32", "S k"),
        ),
        reference=top_logprobs,
        tolerance=_tolerance,
        discrete=("chosen_rank", "ids"),
        enumerate_cases=_cases,
        generate=_generate,
    )
)
