"""Picking the best columns of a score row: one definition of the tie rule, without sorting."""

from __future__ import annotations

import torch


def best_columns(scores: torch.Tensor, k: int) -> torch.Tensor:
    """bool [t, K]: the k highest of each row, ties to the lower column; -inf and NaN are never picked.

    Everything above the k-th highest value is in; of the columns equal to it, the first ones that still fit.
    """
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    k = min(k, scores.shape[1])
    if k == 0 or scores.shape[0] == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = torch.topk(scores, k, dim=1).values[:, -1:]
    above, equal = scores > threshold, scores == threshold
    room = k - above.sum(1, keepdim=True)
    return (above | (equal & (torch.cumsum(equal, dim=1) <= room))) & (scores > float("-inf"))


def pack_ids(picked: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [t, k]: ids [t, K] (ascending in each row) of the picked columns, in order, -1 at the end."""
    packed = torch.full((picked.shape[0], k), -1, dtype=torch.int32, device=picked.device)
    t, column = picked.nonzero(as_tuple=True)
    place = torch.cumsum(picked, dim=1)[t, column] - 1
    packed[t, place] = ids[t, column].to(torch.int32)
    return packed
