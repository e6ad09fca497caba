"""Engram layers: n-gram rows from a hashed table, gated into every residual stream (section 2.10 of the model notes)."""

from __future__ import annotations

from typing import Any

import torch
from deepinfer_hal.dispatch import Dispatcher

from deepinfer.model.buffers import Buffers
from deepinfer.model.load import EngramWeights
from deepinfer.model.numerics import Numerics


class Engram:
    """Adds the gated n-gram value of each token to views.streams."""

    def __init__(self, text: Any, numerics: Numerics, buffers: Buffers, token_map: torch.Tensor) -> None:
        self.text, self.numerics, self.token_map = text, numerics, token_map
        self.pad = int(token_map[text.engram_pad_token_id])
        columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
        buffers.define("engram_rows", (columns,), torch.int64)
        if numerics.quantise_activations:
            buffers.define_quantised("engram_q", text.engram_width)
        else:
            buffers.define("engram", (text.engram_width,), numerics.stream_dtype)
        buffers.define("engram_kv", ((text.hc_mult + 1) * text.hidden_size,), numerics.stream_dtype)

    def bind(self, dispatcher: Dispatcher) -> None:
        dense, act = self.numerics.dtype_name, "u8" if self.numerics.quantise_activations else self.numerics.dtype_name
        self.hash = dispatcher.bind("engram_hash")
        self.lookup = dispatcher.bind("engram_lookup", out=act)
        self.linear = dispatcher.bind("linear", "engram_wkv", x=act, out=dense)
        self.gate = dispatcher.bind("engram_gate", streams=dense)

    def __call__(self, weights: EngramWeights, ngrams: torch.Tensor, views: Any) -> None:
        """ngrams int32 [T, N]: raw ids at positions p, p - 1, ..., -1 before the start."""
        self.hash(
            ngrams, self.token_map, weights.multipliers, weights.primes, weights.offsets, self.pad, None, views.engram_rows
        )
        if self.numerics.quantise_activations:
            rows, scale = views.engram_q, views.engram_q_scale
        else:
            rows, scale = views.engram, None
        self.lookup(views.engram_rows, weights.table, None, rows, scale)
        self.linear(rows, scale, weights.wkv, None, views.engram_kv, None)
        self.gate(views.engram_kv, weights.q_weight, weights.k_weight, self.text.rms_norm_eps, None, views.streams)
