"""Bytes of a step's buffers, found by laying them out on torch's `meta` device, which allocates nothing.

The network's own parts define their buffers, so that the plan follows them when they change.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from deepinfer.model.attention import Attention
from deepinfer.model.buffers import Buffers
from deepinfer.model.engram import Engram
from deepinfer.model.layers import Blocks
from deepinfer.model.numerics import Numerics
from deepinfer.model.state import StateLayout
from deepinfer.model_config import TextConfig


def workspace_bytes(
    text: TextConfig, numerics: Numerics, layout: StateLayout, slots: int, max_rows: int, max_tokens: int, with_draft: bool
) -> int:
    """Step buffers for `max_rows` token rows, index scores, window rows of prefills beside all slots' history, and two rotation
    tables."""
    buffers = Buffers(max_rows, torch.device("meta"))
    Blocks(text, numerics, buffers)
    attention = Attention(text, numerics, SimpleNamespace(layout=layout, num_slots=slots), buffers, {}, max_tokens)
    if text.engram_layer_ids:
        Engram(text, numerics, buffers, torch.zeros(text.vocab_size, dtype=torch.int32))
    if with_draft and text.draft_layers:
        _define_draft(text, numerics, layout, buffers)
    ids = max_rows * 4 * (1 + text.engram_max_ngram_size)
    tables = 2 * max_tokens * text.qk_rope_head_dim * 4
    return buffers.nbytes + attention.scores.numel() * 4 + attention.flat.numel() + ids + tables


def logits_bytes(text: TextConfig, numerics: Numerics, rows: int) -> int:
    """Float32 logits of `rows` rows, and the collapsed and normed hidden rows they are made from."""
    wide = numerics.stream_dtype.itemsize
    return rows * (4 * text.vocab_size + (text.hc_mult + 2) * text.hidden_size * wide + 4 * text.hc_mult + 4)


def _define_draft(text: TextConfig, numerics: Numerics, layout: StateLayout, buffers: Buffers) -> None:
    """The buffers of deepinfer.model.draft, which needs a loaded network to be built."""
    features = len(text.dspark_target_layer_ids) * text.hidden_size
    buffers.define("features", (features,), numerics.stream_dtype)
    for name, width in (("main_raw", text.hidden_size), ("main", text.hidden_size), ("draft_kv", text.head_dim)):
        buffers.define(name, (width,), numerics.stream_dtype)
    if numerics.quantise_activations:
        buffers.define_quantised("features_q", features)
        buffers.define_quantised("main_q", text.hidden_size)
    buffers.define("rows", (layout.window_row_bytes,), torch.uint8)
