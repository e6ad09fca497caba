"""The DSpark draft over the engine's path: main rows for every token, and the block that proposes tokens (section 2.11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.step import StepMeta

from deepinfer.model.layers import Residual

if TYPE_CHECKING:
    from deepinfer.model.network import Network


@dataclass
class DraftResult:
    """One block per request: base_logits, draft_logits float32 [R, B, V]; tokens int32 [R, B]; raw_hidden [R, B, H];
    confidence_logit, confidence float32 [R, B]."""

    base_logits: torch.Tensor
    draft_logits: torch.Tensor
    tokens: torch.Tensor
    raw_hidden: torch.Tensor
    confidence_logit: torch.Tensor
    confidence: torch.Tensor


class Draft:
    """Shares the backbone's buffers, blocks and attention; owns the projection of target features and the heads."""

    def __init__(self, network: Network, dispatcher: Dispatcher) -> None:
        self.network, self.weights, self.text = network, network.weights.draft, network.text
        text, numerics, buffers = self.text, network.numerics, network.buffers
        dtype, hidden = numerics.stream_dtype, text.hidden_size
        self.targets = {layer: i for i, layer in enumerate(text.dspark_target_layer_ids)}
        buffers.define("features", (len(self.targets) * hidden,), dtype)
        buffers.define("main_raw", (hidden,), dtype)
        buffers.define("main", (hidden,), dtype)
        buffers.define("draft_kv", (text.head_dim,), dtype)
        if numerics.quantise_activations:
            buffers.define_quantised("features_q", len(self.targets) * hidden)
            buffers.define_quantised("main_q", hidden)
        self.rows = torch.zeros(buffers.max_rows, network.state.layout.window_row_bytes, dtype=torch.uint8, device=buffers.device)
        self._bind(dispatcher)

    def _bind(self, dispatcher: Dispatcher) -> None:
        numerics = self.network.numerics
        dense, act = numerics.dtype_name, "u8" if numerics.quantise_activations else numerics.dtype_name
        self.features = dispatcher.bind("draft_features", out=dense)
        self.quantise = dispatcher.bind("quantise", "features", x=dense, format="fp8_32")
        self.main_proj = dispatcher.bind("linear", "main_proj", x=act, out=dense)
        self.norm = dispatcher.bind("rms_norm", "main_norm", x=dense)
        self.wkv = dispatcher.bind("linear", "draft_wkv", x=act, out=dense)
        self.store = dispatcher.bind("store_draft_kv", x=dense, format=numerics.window_format)
        self.attention = dispatcher.bind("draft_attention", q=dense, window_format=numerics.window_format)
        self.markov = dispatcher.bind("markov_logits")
        self.confidence = dispatcher.bind("confidence_head")
        self.sample = dispatcher.bind("sample", "draft")

    def feature_collector(self, views: Any) -> Callable[[int], None]:
        """Called with each layer at its attention input; keeps the mean of the streams at the target layers."""
        hidden = self.text.hidden_size

        def collect(layer: int) -> None:
            index = self.targets.get(layer)
            if index is not None:
                self.features(views.streams, None, views.features[:, index * hidden : (index + 1) * hidden])

        return collect

    def store_main(self, meta: StepMeta, views: Any) -> None:
        """Projects the target features of every token and stores each draft layer's main rows in its ring."""
        network, text = self.network, self.text
        if network.numerics.quantise_activations:
            self.quantise(views.features, "fp8_32", None, views.features_q, views.features_q_scale, None)
            self.main_proj(views.features_q, views.features_q_scale, self.weights.main_proj, None, views.main_raw, None)
            self.norm(
                views.main_raw, self.weights.main_norm, text.rms_norm_eps, None, None, views.main_q, views.main_q_scale
            )
            main, scale = views.main_q, views.main_q_scale
        else:
            self.main_proj(views.features, None, self.weights.main_proj, None, views.main_raw, None)
            self.norm(views.main_raw, self.weights.main_norm, text.rms_norm_eps, None, views.main, None, None)
            main, scale = views.main, None
        for block, topology in zip(self.weights.blocks, text.draft_layers, strict=True):
            self.wkv(main, scale, block.draft_wkv, None, views.draft_kv, None)
            self.store(
                views.draft_kv, block.kv_norm, text.rms_norm_eps, meta.positions, network.tables["plain"], meta.ring_slots,
                network.numerics.window_format, None, network.state.ring(topology.layer),
            )  # fmt: skip

    def __call__(self, slots: torch.Tensor, anchors: torch.Tensor, gold: torch.Tensor) -> DraftResult:
        """Proposes a block for R requests.

        slots, anchors, gold int32 [R]: state slot, last accepted position P, and the token already chosen for P + 1. The
        sequential part is greedy.
        """
        network, text = self.network, self.text
        requests, size, device = slots.shape[0], text.dspark_block_size, slots.device
        ids = torch.full((requests, size), text.dspark_noise_token_id, dtype=torch.int32, device=device)
        ids[:, 0] = gold
        steps = torch.arange(1, size + 1, dtype=torch.int32, device=device)
        positions = (anchors[:, None] + steps).reshape(-1).contiguous()
        views = network.buffers.rows(requests * size)
        network.embed(ids.view(-1), network.weights.embedding, None, views.streams)
        residual = network.blocks.start(views)
        layout = network.state.layout
        base = slots * layout.slot_rows
        window = (base, torch.zeros_like(base), torch.full_like(base, layout.ring_rows))
        for block, topology in zip(self.weights.blocks, text.draft_layers, strict=True):
            self._block(block, topology, residual, positions, anchors, window, views)
        network.blocks.finish_site(residual, views)
        return self._heads(residual, gold, requests, size, views)

    def _block(
        self, block: Any, topology: Any, residual: Residual, positions: torch.Tensor, anchors: torch.Tensor, window: Any,
        views: Any,
    ) -> None:  # fmt: skip
        network, text, table = self.network, self.text, self.network.tables["plain"]
        attention, fmt = network.attention, network.numerics.window_format
        network.blocks.enter_site(block.attn_site, residual, views)
        quantised = network.numerics.quantise_activations
        x, x_scale = (views.x_q, views.x_q_scale) if quantised else (views.x, None)
        attention.attn_in(x, x_scale, block.attn_in, None, views.attn_in, None)
        attention.query(block, positions, views, table)
        rows = self.rows[: positions.shape[0]]
        order = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        attention.write_window(views.kv_raw, block.kv_norm, text.rms_norm_eps, positions, table, order, fmt, 0, None, rows, None)
        self.attention(
            views.q, network.state.ring(topology.layer), *window, fmt, anchors, rows, text.dspark_block_size, block.sink,
            attention.scale, text.sliding_window, None, views.o,
        )  # fmt: skip
        attention.output(block, positions, views, table)
        network.blocks.enter_site(block.ffn_site, residual, views)
        network.blocks.feed_forward(block.moe, True, views)

    def _heads(self, residual: Residual, gold: torch.Tensor, requests: int, size: int, views: Any) -> DraftResult:
        """Base logits of all rows, then the Markov chain and the confidence of each step."""
        network, text, weights = self.network, self.text, self.weights
        device, dtype = gold.device, network.numerics.stream_dtype
        rows, hidden, vocab = requests * size, text.hidden_size, text.vocab_size
        raw = torch.empty(rows, hidden, dtype=dtype, device=device)
        normed = torch.empty_like(raw)
        base = torch.empty(rows, vocab, dtype=torch.float32, device=device)
        network.collapse(views.streams, residual.pre, None, raw)
        network.norm(raw, weights.norm, text.rms_norm_eps, None, normed, None, None)
        network.head(normed, None, network.weights.head, None, base, None)
        result = DraftResult(
            base.view(requests, size, vocab),
            torch.empty(requests, size, vocab, dtype=torch.float32, device=device),
            torch.empty(requests, size, dtype=torch.int32, device=device),
            raw.view(requests, size, hidden),
            torch.empty(requests, size, dtype=torch.float32, device=device),
            torch.empty(requests, size, dtype=torch.float32, device=device),
        )
        previous = gold
        for step in range(size):
            previous = self._chain(result, step, previous)
        return result

    def _chain(self, result: DraftResult, step: int, previous: torch.Tensor) -> torch.Tensor:
        """One sequential step for all requests; returns its tokens."""
        weights, requests, device = self.weights, previous.shape[0], previous.device
        logits = torch.empty_like(result.base_logits[:, step])
        embedded = torch.empty(requests, self.text.dspark_markov_rank, dtype=result.raw_hidden.dtype, device=device)
        base = result.base_logits[:, step].contiguous()
        self.markov(base, previous, weights.markov_embed, weights.markov_head, logits, embedded)
        logit = torch.empty(requests, dtype=torch.float32, device=device)
        probability = torch.empty_like(logit)
        self.confidence(result.raw_hidden[:, step].contiguous(), embedded, weights.confidence, 1.0, logit, probability)
        zeros, token = torch.zeros_like(logit), torch.empty(requests, dtype=torch.int32, device=device)
        none, seeds = torch.zeros_like(previous), torch.zeros(requests, dtype=torch.int64, device=device)
        self.sample(logits, zeros, none, zeros + 1, zeros, seeds, none, 0, token)
        result.draft_logits[:, step], result.tokens[:, step] = logits, token
        result.confidence_logit[:, step], result.confidence[:, step] = logit, probability
        return token
