"""The attention sub-layer over the caches: queries, window and compressed rows, indexer, sparse attention, output.

One numeric definition serves prefill, decode and mixed steps. Window rows of a step whose chunks outrun the ring pass
through a flat buffer of the ring's own bytes: history is copied in, new rows are stored behind it, and the newest rows are
copied back after attention.
"""

from __future__ import annotations

from typing import Any

import torch
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.step import RatioMeta, StepMeta

from deepinfer.errors import CapacityError
from deepinfer.model.buffers import Buffers
from deepinfer.model.load import BlockWeights
from deepinfer.model.numerics import Numerics
from deepinfer.model.state import BLOCK_TOKENS, State

_SCORE_BYTES = 128 << 20
"""Index scores are made for as many token rows at a time as fit here: enough to keep a device busy at 131 072 columns."""


class Attention:
    """Runs the attention of one block: `__call__(block, topology, meta, views)` leaves the result in views.y."""

    def __init__(
        self, text: Any, numerics: Numerics, state: State, buffers: Buffers, tables: dict[str, torch.Tensor], max_tokens: int
    ) -> None:
        """max_tokens: longest sequence."""
        self.text, self.numerics, self.state, self.tables = text, numerics, state, tables
        self.scale = text.head_dim**-0.5
        self.eps = text.rms_norm_eps
        self.pool_columns = text.candidate_topk_blocks * text.candidate_block_size
        self._define(buffers)
        flat_rows = state.layout.flat_sizes(state.num_slots, buffers.max_rows).rows  # graphs hold its address, so it never grows
        self.flat = torch.zeros(flat_rows, state.layout.window_row_bytes, dtype=torch.uint8, device=buffers.device)
        columns = max_tokens + text.candidate_block_size  # a pool's are whole blocks
        scores = min(_SCORE_BYTES // 4, buffers.max_rows * columns)
        self.scores = torch.zeros(scores, dtype=torch.float32, device=buffers.device)

    def _define(self, buffers: Buffers) -> None:
        text, dtype = self.text, self.numerics.stream_dtype
        heads, width, lora = text.num_attention_heads, text.head_dim, text.q_lora_rank
        index = text.index_n_heads * text.index_head_dim
        buffers.define("attn_in", (lora + width,), dtype)
        buffers.derive("q_latent_raw", "attn_in", lambda t: t[:, :lora])
        buffers.derive("kv_raw", "attn_in", lambda t: t[:, lora:])
        buffers.define("q_latent", (lora,), dtype)
        buffers.define("q_flat", (heads * width,), dtype)
        buffers.derive("q", "q_flat", lambda t: t.view(-1, heads, width))
        buffers.define("o", (heads, width), dtype)
        buffers.derive("o_flat", "o", lambda t: t.view(-1, heads * width))
        buffers.define("lora_out", (text.o_groups * text.o_lora_rank,), dtype)
        if self.numerics.quantise_activations:
            buffers.define_quantised("q_latent_q", lora)
            buffers.define_quantised("o_q", heads * width)
            buffers.define_quantised("lora_out_q", text.o_groups * text.o_lora_rank)
        for name in ("group_value", "group_gate"):
            buffers.define(name, (width,), torch.float32)
        for name in ("group", "latent"):
            buffers.define(name, (width,), dtype)
        buffers.define("index_key", (text.index_head_dim,), dtype)
        buffers.define("index_query", (index,), dtype)
        buffers.derive("index_query_heads", "index_query", lambda t: t.view(-1, text.index_n_heads, text.index_head_dim))
        buffers.define("index_codes", (index // 2,), torch.uint8)
        buffers.derive("index_codes_heads", "index_codes", lambda t: t.view(-1, text.index_n_heads, text.index_head_dim // 2))
        buffers.define("index_scale", (index // 32,), torch.uint8)
        buffers.derive("index_scale_heads", "index_scale", lambda t: t.view(-1, text.index_n_heads, text.index_head_dim // 32))
        buffers.define("index_weights", (text.index_n_heads,), dtype)
        buffers.define("selected", (text.index_topk,), torch.int32)
        buffers.define("candidates", (text.candidate_topk_blocks,), torch.int32)

    def bind(self, dispatcher: Dispatcher) -> None:
        """Chooses the kernels of every op of this sub-layer."""
        numerics = self.numerics
        dense, act = numerics.dtype_name, "u8" if numerics.quantise_activations else numerics.dtype_name

        def linear(role: str, x: str, out: str) -> Any:
            return dispatcher.bind("linear", role, x=x, out=out)

        self.attn_in, self.wq_b = linear("attn_in", act, dense), linear("wq_b", act, dense)
        self.wo_b = linear("wo_b", act, dense)
        self.wo_a = dispatcher.bind("grouped_linear", "wo_a", x=act, out=act)
        self.compressor_f32 = linear("compressor_wkv", dense, "f32")
        self.compressor = linear("compressor_wkv_ratio_1", dense, dense)
        self.index_wk, self.index_wq_b = linear("indexer_wk", dense, dense), linear("indexer_wq_b", act, dense)
        self.index_weights = linear("indexer_weights_proj", dense, dense)
        self.rms_norm = dispatcher.bind("rms_norm", "q_norm", x=dense)
        self.rope = dispatcher.bind("rope", x=dense)
        self.quantise = dispatcher.bind("quantise", "attention", x=dense, format="fp8_32")
        self.quantise_index = dispatcher.bind("quantise", "index_query", x=dense, format="mxfp4_32")
        self.write_window = dispatcher.bind("write_kv", "window", x=dense, format=numerics.window_format)
        self.write_main = dispatcher.bind("write_kv", "compressed", x=dense, format=numerics.main_format)
        self.write_index = dispatcher.bind("write_kv", "index", x=dense, format=numerics.index_format)
        self.compress = dispatcher.bind("compress_kv", out=dense)
        query = "u8" if numerics.quantise_index_query else dense
        self.score_index = dispatcher.bind("score_index", q=query, format=numerics.index_format)
        self.select_topk = dispatcher.bind("select_topk")
        self.select_blocks = dispatcher.bind("select_candidate_blocks")
        formats = {"window_format": numerics.window_format, "compressed_format": numerics.main_format}
        self.sparse_attention = dispatcher.bind("sparse_attention", q=dense, **formats)
        self.layer = dispatcher.bind("attention_decode_layer", x=act, out=dense, **formats)
        self.copy_rows = dispatcher.bind("copy_rows", "window")

    def __call__(self, block: BlockWeights, topology: Any, meta: StepMeta, views: Any) -> None:
        table = self.tables[topology.rope]
        window = self._window(topology.layer, meta)
        if topology.owns_kv or topology.owns_index_query:
            self._source_layer(block, topology, meta, views, table, window)
        else:
            self._consumer_layer(block, topology, meta, views, table, window)
        if meta.flat:
            self.copy_rows(window, meta.save_src, meta.save_dst, self.state.ring(topology.layer))

    def _input(self, views: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (views.x_q, views.x_q_scale) if self.numerics.quantise_activations else (views.x, None)

    def _selected(self, topology: Any, meta: StepMeta, views: Any) -> tuple[Any, ...]:
        """What sparse attention reads of the compressed rows: cache, block table, format, rows of a block, selection."""
        if not topology.ratio:
            return None, None, self.numerics.main_format, 0, None
        rows = self.state.main_rows(topology.kv_source)
        return rows, meta.block_tables, self.numerics.main_format, BLOCK_TOKENS // topology.ratio, views.selected

    def _consumer_layer(
        self, block: BlockWeights, topology: Any, meta: StepMeta, views: Any, table: torch.Tensor, window: torch.Tensor
    ) -> None:
        """A layer that owns no compressed rows and makes no selection is one composite."""
        x, x_scale = self._input(views)
        self.layer(
            x, x_scale, block.attn_in, block.q_norm, block.kv_norm, block.wq_b, block.sink, block.wo_a, block.wo_b, self.eps,
            meta.positions, table, meta.row_to_req, meta.window_slots, meta.window_base, meta.window_origin, meta.window_modulo,
            self.numerics.window_format, *self._selected(topology, meta, views), self.scale, self.text.sliding_window, None,
            window, views.y,
        )  # fmt: skip

    def _source_layer(
        self, block: BlockWeights, topology: Any, meta: StepMeta, views: Any, table: torch.Tensor, window: torch.Tensor
    ) -> None:
        """The same from its parts, with the compressor and the selection between query and attention."""
        x, x_scale = self._input(views)
        self.attn_in(x, x_scale, block.attn_in, None, views.attn_in, None)
        q_latent, q_scale = self._query(block, meta, views, table)
        self.write_window(
            views.kv_raw, block.kv_norm, self.eps, meta.positions, table, meta.window_slots, self.numerics.window_format, 0,
            None, window, None,
        )  # fmt: skip
        ratio = meta.ratios[topology.ratio]
        if topology.owns_kv:
            self._store_compressed(block, topology, meta, ratio, views, table)
        if topology.owns_index_query:
            self._select(block, topology, meta, ratio, views, q_latent, q_scale, table)
        self.sparse_attention(
            views.q, window, meta.window_base, meta.window_origin, meta.window_modulo, self.numerics.window_format,
            *self._selected(topology, meta, views), meta.row_to_req, meta.positions, block.sink, self.scale,
            self.text.sliding_window, None, views.o,
        )  # fmt: skip
        self.output(block, meta.positions, views, table)

    def _query(self, block: BlockWeights, meta: StepMeta, views: Any, table: torch.Tensor) -> tuple[Any, Any]:
        """Leaves rotated queries in views.q; returns the query latent as the indexer's input."""
        self.query(block, meta.positions, views, table)
        if self.numerics.quantise_activations:
            return views.q_latent_q, views.q_latent_q_scale
        return views.q_latent, None

    def query(self, block: BlockWeights, positions: torch.Tensor, views: Any, table: torch.Tensor) -> None:
        """q = rope(RMSNorm(x wq_a) wq_b), from the latent in views.q_latent_raw."""
        if self.numerics.quantise_activations:
            codes, scale = views.q_latent_q, views.q_latent_q_scale
            self.rms_norm(views.q_latent_raw, block.q_norm, self.eps, None, None, codes, scale)
            self.wq_b(codes, scale, block.wq_b, None, views.q_flat, None)
        else:
            self.rms_norm(views.q_latent_raw, block.q_norm, self.eps, None, views.q_latent, None, None)
            self.wq_b(views.q_latent, None, block.wq_b, None, views.q_flat, None)
        self.rope(positions, table, False, None, views.q)

    def _window(self, layer: int, meta: StepMeta) -> torch.Tensor:
        """The store of window rows that this step writes and attends: the ring, or the flat buffer with history in it."""
        ring = self.state.ring(layer)
        if not meta.flat:
            return ring
        if meta.flat_rows > len(self.flat):
            wanted = f"a step needs {meta.flat_rows} rows of the flat buffer, which has {len(self.flat)}"
            raise CapacityError(f"{wanted}: it has more requests than there are slots")
        flat = self.flat[: meta.flat_rows]
        self.copy_rows(ring, meta.load_src, meta.load_dst, flat)
        return flat

    def _store_compressed(
        self, block: BlockWeights, topology: Any, meta: StepMeta, ratio: RatioMeta, views: Any, table: torch.Tensor
    ) -> None:
        """Compressor, then the main row and the index key of every group that this step completes."""
        weights, layer, source = block.compressor, topology.layer, self.state.layout.source(topology.layer)
        groups = ratio.complete.shape[0]
        group, latent, key = views.group[:groups], views.latent[:groups], views.index_key[:groups]
        if topology.ratio == 1:
            self.compressor(views.x, None, weights.wkv, None, group, None)
        else:
            self.compressor_f32(views.x, None, weights.wkv, None, views.group_value, None)
            self.compressor_f32(views.x, None, weights.wgate, None, views.group_gate, None)
            self.compress(
                views.group_value, views.group_gate, meta.positions, meta.row_to_req, meta.cu_q, meta.slots, ratio.complete,
                topology.ratio, self.state.carry[layer], group,
            )  # fmt: skip
        if groups == 0:
            return
        self.write_main(
            group, weights.norm, self.eps, ratio.positions, table, ratio.slots, self.numerics.main_format, source.block_rows,
            None, self.state.main_rows(layer), latent,
        )  # fmt: skip
        self.index_wk(latent, None, block.indexer.wk, None, key, None)
        self.write_index(
            key, block.indexer.k_norm, self.eps, ratio.positions, table, ratio.slots, self.numerics.index_format,
            source.block_rows, None, self.state.index_rows(layer), None,
        )  # fmt: skip

    def _select(
        self, block: BlockWeights, topology: Any, meta: StepMeta, ratio: RatioMeta, views: Any, q_latent: Any, q_scale: Any,
        table: torch.Tensor,
    ) -> None:  # fmt: skip
        """Leaves the selected compressed rows in views.selected, and at the pool's source the candidate blocks."""
        self.index_wq_b(q_latent, q_scale, block.indexer.wq_b, None, views.index_query, None)
        self.rope(meta.positions, table, False, None, views.index_query_heads)
        self.index_weights(views.x, None, block.indexer.weights_proj, None, views.index_weights, None)
        query, scale = views.index_query_heads, None
        if self.numerics.quantise_index_query:
            self.quantise_index(views.index_query, "mxfp4_32", None, views.index_codes, views.index_scale, None)
            query, scale = views.index_codes_heads, views.index_scale_heads
        columns = max(ratio.max_visible, 1)
        if topology.uses_pool:
            block_size = self.text.candidate_block_size
            columns = min(self.pool_columns, -(-columns // block_size) * block_size)
        step = max(1, self.scores.numel() // columns)
        for start in range(0, meta.num_rows, step):
            part = slice(start, min(start + step, meta.num_rows))
            whole = part.start == 0 and part.stop == meta.num_rows
            self._select_rows(topology, meta, ratio, views, query, scale, columns, None if whole else part)

    def _select_rows(
        self, topology: Any, meta: StepMeta, ratio: RatioMeta, views: Any, query: Any, scale: Any, columns: int,
        part: slice | None,
    ) -> None:  # fmt: skip
        """Scores and selects for some token rows (None = all)."""

        def cut(t: torch.Tensor | None) -> torch.Tensor | None:
            return t if part is None or t is None else t[part]

        text, source = self.text, self.state.layout.source(topology.kv_source)
        visible, weights = cut(ratio.visible), cut(views.index_weights)
        candidates = None
        if topology.uses_pool:
            candidates = cut(views.candidates)[:, : columns // text.candidate_block_size]
        scores = self.scores[: visible.shape[0] * columns].view(visible.shape[0], columns)
        self.score_index(
            cut(query), cut(scale), weights, self.state.index_rows(topology.kv_source), meta.block_tables,
            cut(meta.row_to_req), visible, candidates, text.candidate_block_size, self.numerics.index_format,
            source.block_rows, None, scores,
        )  # fmt: skip
        self.select_topk(scores, candidates, text.candidate_block_size, None, cut(views.selected))
        if topology.builds_pool:
            self.select_blocks(scores, visible, text.candidate_block_size, None, cut(views.candidates))

    def output(self, block: BlockWeights, positions: torch.Tensor, views: Any, table: torch.Tensor) -> None:
        """Inverse rotation of views.o, grouped low-rank output, into views.y."""
        self.rope(positions, table, True, None, views.o)
        if self.numerics.quantise_activations:
            self.quantise(views.o_flat, "fp8_32", None, views.o_q, views.o_q_scale, None)
            self.wo_a(views.o_q, views.o_q_scale, block.wo_a, None, views.lora_out_q, views.lora_out_q_scale)
            self.wo_b(views.lora_out_q, views.lora_out_q_scale, block.wo_b, None, views.y, None)
        else:
            self.wo_a(views.o_flat, None, block.wo_a, None, views.lora_out, None)
            self.wo_b(views.lora_out, None, block.wo_b, None, views.y, None)
