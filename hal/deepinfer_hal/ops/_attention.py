"""Attention over gathered quantised rows: the numeric definition that every form of it shares.

A query row has one key list. It is cut at multiples of 64; each piece gives a maximum, a sum of exponentials and a
weighted sum of values; the pieces are merged left to right; the sink joins the denominator at the end (V4.1
attention, section 2.4 of the model notes). K = V.
"""

from __future__ import annotations

import torch

from deepinfer_hal.row_layout import read_rows

SPLIT = 64
"""Keys of one piece of a key list."""

GATHER_BYTES = 64 << 20
"""Bound on the gathered keys and partial results of one chunk of query rows."""


def window_slots(
    first: torch.Tensor, last: torch.Tensor, base: torch.Tensor, origin: torch.Tensor, modulo: torch.Tensor
) -> torch.Tensor:
    """int64 [t, W] window rows of the positions first..last of each row, ascending; -1 after the end.

    Position s lies at base + (s - origin) % modulo: a ring with modulo its length, a flat store with modulo its size.
    """
    lengths = (last - first + 1).clamp_min(0)
    width = int(lengths.max()) if lengths.numel() else 0
    offset = torch.arange(width, device=first.device)
    position = first[:, None] + offset
    slots = base[:, None] + (position - origin[:, None]) % modulo[:, None]
    return torch.where(offset < lengths[:, None], slots, -1)


def place_rows(
    keys: torch.Tensor, start: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, format: str, block_rows: int
) -> None:
    """keys[t, start[t] + c] = the row at slots[t, c], for every slot >= 0. Each distinct row is decoded once."""
    t, c = (slots >= 0).nonzero(as_tuple=True)
    if t.numel() == 0:
        return
    distinct, inverse = torch.unique(slots[t, c], return_inverse=True)
    rows = read_rows(cache, distinct, format, keys.shape[-1], block_rows).to(keys.dtype)
    keys[t, start[t] + c] = rows[inverse]


def padded_length(longest: int) -> int:
    """Keys of a list, rounded up to whole pieces; at least one piece."""
    return max(-(-longest // SPLIT), 1) * SPLIT


def rows_per_chunk(keys: int, heads: int, width: int) -> int:
    """Query rows whose gathered keys and partial results stay within GATHER_BYTES."""
    per_row = 4 * width * (keys + heads * (keys // SPLIT))
    return max(1, GATHER_BYTES // per_row)


def attend(
    q: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """[t, h, D] in q's dtype (float32 or float64): attention of q [t, h, D] over the first lengths[t] of keys [t, K,
    D].

    K is a multiple of 64; keys past a row's length must be finite. A row without keys gives 0.
    """
    t, heads, width = q.shape
    pieces = keys.shape[1] // SPLIT
    scores = torch.bmm(q, keys.transpose(1, 2)) * scale
    valid = torch.arange(keys.shape[1], device=q.device) < lengths[:, None]
    scores = scores.masked_fill(~valid[:, None, :], float("-inf")).unflatten(2, (pieces, SPLIT)).transpose(1, 2)
    largest = scores.amax(-1)
    safe = torch.where(largest == float("-inf"), 0.0, largest)
    weights = torch.exp(scores - safe[..., None])
    sums = weights.sum(-1)
    values = torch.bmm(weights.flatten(0, 1), keys.reshape(t * pieces, SPLIT, width)).unflatten(0, (t, pieces))
    return _merge(largest, sums, values, sink, lengths)


def _merge(largest, sums, values, sink, lengths) -> torch.Tensor:
    """Left-to-right merge of the pieces: largest, sums [t, pieces, h]; values [t, pieces, h, D]."""
    peak, total, result = largest[:, 0], sums[:, 0], values[:, 0]
    for i in range(1, largest.shape[1]):
        highest = torch.maximum(peak, largest[:, i])
        # A piece past the end of the list has weight exp(-inf) = 0; a list without any key is set to 0 below.
        safe = torch.where(highest == float("-inf"), 0.0, highest)
        old, new = torch.exp(peak - safe), torch.exp(largest[:, i] - safe)
        total = total * old + sums[:, i] * new
        result = result * old[..., None] + values[:, i] * new[..., None]
        peak = highest
    denominator = total + torch.exp(sink - torch.where(peak == float("-inf"), 0.0, peak))
    return torch.where((lengths > 0)[:, None, None], result / denominator[..., None], 0.0)
