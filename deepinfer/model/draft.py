"""The DSpark draft over the engine's path: main rows for every token, and the block that proposes tokens (section 2.11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.step import StepMeta

from deepinfer.model.buffers import Buffers
from deepinfer.model.layers import Residual

if TYPE_CHECKING:
    from deepinfer.model.network import Network


@dataclass
class DraftResult:
    """The first S tokens of a block per request: base_logits, draft_logits float32 [R, S, V]; tokens int32 [R, S]; raw_hidden
    [R, S, H]; confidence_logit, confidence float32 [R, S]. Rows of a step lie together, those of a request do not."""

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
        self.inputs = self._make_inputs()
        self._bind(dispatcher)

    def _make_inputs(self) -> Buffers:
        """What the ops of a block read besides weights and the call's own arguments, by request. Made once, since making one of
        these on a device takes as long as a small op; of all of it a call writes only the first id of each block."""
        text, rows, device = self.text, self.network.buffers.max_rows, self.network.buffers.device
        self.order = torch.arange(rows, dtype=torch.int32, device=device)
        self.steps = torch.arange(1, text.dspark_block_size + 1, dtype=torch.int32, device=device)
        inputs = Buffers(max(1, rows // text.dspark_block_size), device)
        inputs.define("ids", (text.dspark_block_size,), torch.int32)
        inputs.rows(inputs.max_rows).ids.fill_(text.dspark_noise_token_id)
        inputs.define("ring_rows", (), torch.int32)
        inputs.rows(inputs.max_rows).ring_rows.fill_(self.network.state.layout.ring_rows)
        for name, dtype in (("zero", torch.float32), ("one", torch.float32), ("none", torch.int32), ("seeds", torch.int64)):
            inputs.define(name, (), dtype)
        inputs.rows(inputs.max_rows).one.fill_(1.0)
        return inputs

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

    def __call__(
        self, slots: torch.Tensor, anchors: torch.Tensor, gold: torch.Tensor, drafts: int | None = None
    ) -> DraftResult:
        """Proposes tokens for R requests.

        slots, anchors, gold int32 [R]: state slot, last accepted position P, and the token already chosen for P + 1. drafts: how
        many tokens of the block are wanted, by default all: its rows see one another, so all of them run, but heads and the
        sequential part, which is greedy, run for the first `drafts` alone and give the same for them.
        """
        network, text = self.network, self.text
        requests, size = slots.shape[0], text.dspark_block_size
        given = self.inputs.rows(requests)
        given.ids[:, 0] = gold
        positions = (anchors[:, None] + self.steps).view(-1)
        views = network.buffers.rows(requests * size)
        network.embed(given.ids.view(-1), network.weights.embedding, None, views.streams)
        residual = network.blocks.start(views)
        window = slots * network.state.layout.slot_rows, given.none, given.ring_rows
        for block, topology in zip(self.weights.blocks, text.draft_layers, strict=True):
            self._block(block, topology, residual, positions, anchors, window, views)
        network.blocks.finish_site(residual, views)
        return self._heads(residual, gold, size if drafts is None else min(drafts, size), views)

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
        rows, order = self.rows[: positions.shape[0]], self.order[: positions.shape[0]]
        attention.write_window(views.kv_raw, block.kv_norm, text.rms_norm_eps, positions, table, order, fmt, 0, None, rows, None)
        self.attention(
            views.q, network.state.ring(topology.layer), *window, fmt, anchors, rows, text.dspark_block_size, block.sink,
            attention.scale, text.sliding_window, None, views.o,
        )  # fmt: skip
        attention.output(block, positions, views, table)
        network.blocks.enter_site(block.ffn_site, residual, views)
        network.blocks.feed_forward(block.moe, True, views)

    def _heads(self, residual: Residual, gold: torch.Tensor, steps: int, views: Any) -> DraftResult:
        """Base logits of the first `steps` rows of each block, then the Markov chain and the confidence of each step. All is
        kept step by step, so that a step's rows of all requests are one matrix and nothing is copied in between."""
        network, text, weights = self.network, self.text, self.weights
        device, requests = gold.device, gold.shape[0]
        raw = torch.empty(views.streams.shape[0], text.hidden_size, dtype=network.numerics.stream_dtype, device=device)
        network.collapse(views.streams, residual.pre, None, raw)
        raw = raw.view(requests, text.dspark_block_size, text.hidden_size)[:, :steps].transpose(0, 1).contiguous()
        normed = torch.empty_like(raw)
        network.norm(raw.flatten(0, 1), weights.norm, text.rms_norm_eps, None, normed.flatten(0, 1), None, None)
        base = torch.empty(steps, requests, text.vocab_size, dtype=torch.float32, device=device)
        network.head(normed.flatten(0, 1), None, network.weights.head, None, base.flatten(0, 1), None)
        logit, probability = (_by_step(steps, requests, torch.float32, device) for _ in range(2))
        by_step = DraftResult(
            base, torch.empty_like(base), _by_step(steps, requests, torch.int32, device), raw, logit, probability
        )
        previous = gold
        for step in range(steps):
            previous = self._chain(by_step, step, previous)
        return DraftResult(*(value.transpose(0, 1) for value in vars(by_step).values()))

    def _chain(self, by_step: DraftResult, step: int, previous: torch.Tensor) -> torch.Tensor:
        """One sequential step for all requests; returns its tokens."""
        weights, requests = self.weights, previous.shape[0]
        raw, logits, tokens = by_step.raw_hidden[step], by_step.draft_logits[step], by_step.tokens[step]
        embedded = torch.empty(requests, self.text.dspark_markov_rank, dtype=raw.dtype, device=raw.device)
        self.markov(by_step.base_logits[step], previous, weights.markov_embed, weights.markov_head, logits, embedded)
        self.confidence(raw, embedded, weights.confidence, 1.0, by_step.confidence_logit[step], by_step.confidence[step])
        given = self.inputs.rows(requests)  # temperature 0, so nothing else of the settings counts
        self.sample(logits, given.zero, given.none, given.one, given.zero, given.seeds, given.none, 0, tokens)
        return tokens


def _by_step(steps: int, requests: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for [steps, requests] numbers of four bytes, each step's at a multiple of 16 bytes: kernels may be compiled anew for
    an address that is none."""
    return torch.empty(steps, -(-requests // 4) * 4, dtype=dtype, device=device)[:, :requests]
