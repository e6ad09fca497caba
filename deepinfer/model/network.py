"""The whole network over the caches: token ids in, logits out, every tensor operation through the HAL.

    ids -> embedding -> blocks (Engram, attention, MoE, each inside a residual site) -> stream collapse -> norm -> head
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.step import StepMeta

from deepinfer.model.attention import Attention
from deepinfer.model.buffers import Buffers
from deepinfer.model.draft import Draft
from deepinfer.model.engram import Engram
from deepinfer.model.layers import Blocks, Residual
from deepinfer.model.load import ModelWeights
from deepinfer.model.numerics import Numerics
from deepinfer.model.rope import rope_table
from deepinfer.model.state import State


class Network:
    """A loaded model on one device.

    max_rows: token rows of the largest step; max_logit_rows: rows whose logits may be asked for in one call;
    max_tokens: longest sequence; token_map int32 [V]: raw to compressed ids (None without Engram layers);
    with_draft: also keep the draft's window rows, so that `draft` can run.
    """

    def __init__(
        self, text: Any, weights: ModelWeights, state: State, numerics: Numerics, dispatcher: Dispatcher, *, max_rows: int,
        max_logit_rows: int, max_tokens: int, token_map: torch.Tensor | None, with_draft: bool = False,
    ) -> None:  # fmt: skip
        device = state.windows.device
        self.text, self.weights, self.state, self.numerics = text, weights, state, numerics
        self.buffers = Buffers(max_rows, device)
        self.outputs = Buffers(max_logit_rows, device)
        self.tables = {kind: rope_table(text, kind, max_tokens, device) for kind in ("plain", "yarn")}
        self.blocks = Blocks(text, numerics, self.buffers)
        self.attention = Attention(text, numerics, state, self.buffers, self.tables, max_tokens)
        has_engram = token_map is not None and bool(text.engram_layer_ids)
        self.engram = Engram(text, numerics, self.buffers, token_map) if has_engram else None
        self.buffers.define("ids", (), torch.int32)
        self.buffers.define("ngrams", (text.engram_max_ngram_size,), torch.int32)
        self._define_outputs()
        self._bind(dispatcher)
        self.draft = None
        if with_draft and weights.draft is not None:
            self.draft = Draft(self, dispatcher)

    def _define_outputs(self) -> None:
        text, dtype, outputs = self.text, self.numerics.stream_dtype, self.outputs
        outputs.define("streams", (text.hc_mult, text.hidden_size), dtype)
        outputs.define("pre", (text.hc_mult,), torch.float32)
        outputs.define("hidden", (text.hidden_size,), dtype)
        outputs.define("normed", (text.hidden_size,), dtype)
        outputs.define("logits", (text.vocab_size,), torch.float32)
        outputs.add("order", torch.arange(outputs.max_rows, dtype=torch.int32, device=outputs.device))

    def _bind(self, dispatcher: Dispatcher) -> None:
        dense = self.numerics.dtype_name
        for part in (self.blocks, self.attention, self.engram):
            if part is not None:
                part.bind(dispatcher)
        self.gather_tokens = dispatcher.bind("gather_tokens")
        self.embed = dispatcher.bind("embedding_gather", out=dense)
        self.copy_rows = dispatcher.bind("copy_rows", "logit_rows")
        self.collapse = dispatcher.bind("stream_collapse", streams=dense)
        self.norm = dispatcher.bind("rms_norm", "final", x=dense)
        self.head = dispatcher.bind("linear", "head", x=dense, out="f32")

    def forward(self, meta: StepMeta) -> Residual:
        """Runs a step; token ids come from the history by position. `logits` then reads any of its rows."""
        views = self.buffers.rows(meta.num_rows)
        self.gather_tokens(self.state.history, meta.slots, meta.row_to_req, meta.positions, None, views.ids, views.ngrams)
        self.embed(views.ids, self.weights.embedding, None, views.streams)
        residual = self.blocks.start(views)
        on_input = self.draft.feature_collector(views) if self.draft is not None else None
        for topology in self.text.layers:
            self.run_block(topology, residual, meta, views, on_input)
        self.blocks.finish_site(residual, views)
        if self.draft is not None:
            self.draft.store_main(meta, views)
        return residual

    def run_block(
        self, topology: Any, residual: Residual, meta: StepMeta, views: Any, on_input: Callable[[int], None] | None = None
    ) -> None:
        """One backbone block on the streams of `views`."""
        block = self.weights.blocks[topology.layer]
        self.blocks.run(block, topology, residual, meta, views, self.attention, self.engram, views.ngrams, on_input)

    def logits(self, residual: Residual, num_rows: int, rows: torch.Tensor) -> torch.Tensor:
        """Final collapse, norm and head of token rows int32 [S] of the step of `num_rows` rows just run.

        Returns float32 [S, V], a view of a buffer that the next call overwrites.
        """
        streams = self.buffers.rows(num_rows).streams
        out = self.outputs.rows(rows.shape[0])
        width = streams.shape[1] * streams.shape[2]
        source = streams.reshape(-1, width).view(torch.uint8)
        self.copy_rows(source, rows, out.order, out.streams.view(-1, width).view(torch.uint8))
        self.copy_rows(residual.pre.view(torch.uint8), rows, out.order, out.pre.view(torch.uint8))
        self.collapse(out.streams, out.pre, None, out.hidden)
        self.norm(out.hidden, self.weights.norm, self.text.rms_norm_eps, None, out.normed, None, None)
        self.head(out.normed, None, self.weights.head, None, out.logits, None)
        return out.logits

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Bytes of step buffers and logits."""
        attention = self.attention.scores.numel() * 4 + self.attention.flat.numel()
        tables = sum(table.numel() * 4 for table in self.tables.values())
        return {"workspace": self.buffers.nbytes + attention + tables, "logits": self.outputs.nbytes}
