"""Helpers that the sampling references share: exact top-k masks, and logits for their cases."""

from __future__ import annotations

import torch


def keep_top(values: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """bool [S, V]: the k[s] highest values of each row (1 <= k <= V), ties to the lower column. No NaN."""
    if values.shape[0] == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    k = k.long()[:, None]
    edge = values.topk(int(k.max()), dim=-1).values.gather(-1, k - 1)
    above, level = values > edge, values == edge
    return above | (level & (level.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def random_logits(rows: int, vocab: int, seed: int, device: str | torch.device) -> torch.Tensor:
    """float32 [rows, vocab] with a wide range, exact ties, and a few -inf columns in every third row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits = (logits * 8).round() / 8
    banned = torch.rand(rows, vocab, generator=generator) < 0.2
    banned[torch.arange(rows) % 3 != 0] = False
    if vocab:
        banned[:, 0] = False
    return logits.masked_fill(banned, float("-inf")).to(device)
