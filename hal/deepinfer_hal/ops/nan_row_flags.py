"""nan_row_flags: which rows of logits cannot be sampled from, so that their requests fail alone."""

from __future__ import annotations

import torch

from deepinfer_hal.card import Case, OpCard, out, register, tensor
from deepinfer_hal.ops._sampling import random_logits


def nan_row_flags(logits: torch.Tensor, flags: torch.Tensor) -> None:
    """flags[s] = 1 if row s has a NaN or +inf, or nothing but -inf; else 0. A row of no columns counts as all -inf."""
    if logits.shape[1] == 0:
        flags.fill_(1)
        return
    flags.copy_(~torch.isfinite(logits.amax(dim=-1)))  # amax hands a NaN on


def _cases():
    for rows, vocab in ((0, 8), (1, 1), (3, 33), (33, 2048), (2, 129280)):
        yield Case("nan_row_flags", {"S": rows, "V": vocab})


def _generate(case, seed, device, prepare):
    rows, vocab = case.params["S"], case.params["V"]
    logits = random_logits(rows, vocab, seed, device)
    for row in range(rows):
        kind = row % 5
        if kind == 1:
            logits[row, (row * 7) % vocab] = float("nan")
        elif kind == 2:
            logits[row] = float("-inf")
        elif kind == 3:
            logits[row, vocab - 1] = float("inf")
    return {"logits": logits, "flags": torch.full((rows,), 0xAA, dtype=torch.uint8, device=device)}


CARD = register(
    OpCard(
        name="nan_row_flags",
        group="sampling",
        summary="Flags rows of logits that hold a NaN or +inf, or nothing but -inf.",
        signature=(tensor("logits", "f32", "S V"), out("flags", "u8", "S")),
        reference=nan_row_flags,
        discrete=("flags",),
        enumerate_cases=_cases,
        generate=_generate,
    )
)
