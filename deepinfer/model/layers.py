"""One block over the caches: two residual sites (single-pass hyper-connections) around attention and MoE.

A site ends the previous one (its post step), then makes this sub-layer's input. `pre` of one site is used by the next, so
two buffers alternate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.step import StepMeta

from deepinfer.model.attention import Attention
from deepinfer.model.buffers import Buffers
from deepinfer.model.engram import Engram
from deepinfer.model.load import BlockWeights, MoeWeights, SiteWeights
from deepinfer.model.numerics import Numerics


@dataclass
class Residual:
    """Where the residual streams stand: `pre` was made by the last site, `pending` tells that its output y is not yet added."""

    pre: torch.Tensor
    pending: bool = False


class Blocks:
    """Runs blocks of the backbone and of the draft; the attention itself is passed in."""

    def __init__(self, text: Any, numerics: Numerics, buffers: Buffers) -> None:
        self.text, self.numerics = text, numerics
        dtype, streams, hidden = numerics.stream_dtype, text.hc_mult, text.hidden_size
        buffers.define("streams", (streams, hidden), dtype)
        for name in ("pre_a", "pre_b", "post"):
            buffers.define(name, (streams,), torch.float32)
        first = torch.zeros(buffers.max_rows, streams, dtype=torch.float32, device=buffers.device)
        first[:, 0] = 1.0
        buffers.add("first_pre", first)
        buffers.define("comb", (streams, streams), torch.float32)
        for name in ("x", "y"):
            buffers.define(name, (hidden,), dtype)
        if numerics.quantise_activations:
            buffers.define_quantised("x_q", hidden)
        self.counts: dict[int, torch.Tensor] = {}
        self.device = buffers.device

    def bind(self, dispatcher: Dispatcher) -> None:
        dense = self.numerics.dtype_name
        quantised = self.numerics.quantise_activations
        self.site = dispatcher.bind("residual_site", streams=dense, quantised=quantised)
        self.post = dispatcher.bind("hyper_connection_post", streams=dense)
        self.moe = dispatcher.bind("moe_layer", x=dense, quantised=quantised)

    def start(self, views: Any) -> Residual:
        """State before the first block, whose streams are copies of the embedding: `pre` is one-hot on stream 0."""
        return Residual(views.first_pre)

    def finish_site(self, residual: Residual, views: Any) -> None:
        """Adds the pending sub-layer output to the streams."""
        if residual.pending:
            self.post(views.y, views.post, views.comb, None, views.streams)
            residual.pending = False

    def enter_site(self, site: SiteWeights, residual: Residual, views: Any) -> None:
        """Post step of the previous site if one is pending, then this site's mix, norm and quantisation into views.x."""
        text = self.text
        codes, scales = (views.x_q, views.x_q_scale) if self.numerics.quantise_activations else (None, None)
        y, post, comb = (views.y, views.post, views.comb) if residual.pending else (None, None, None)
        pre = views.pre_b if residual.pre is views.pre_a else views.pre_a
        self.site(
            y, post, comb, site.fn, site.base, site.scale, residual.pre, site.norm, text.rms_norm_eps, text.hc_eps,
            text.hc_sinkhorn_iters, None, views.streams, views.x, codes, scales, pre, views.post, views.comb,
        )  # fmt: skip
        residual.pre = pre
        residual.pending = True

    def feed_forward(self, moe: MoeWeights, is_draft: bool, views: Any, count: torch.Tensor | None = None) -> None:
        """Router, routed experts and shared expert of views.x into views.y. count: rows that are not padding, so that no
        expert is read for a padded one."""
        text = self.text
        top_k = text.dspark_num_experts_per_tok if is_draft else text.num_experts_per_tok
        experts = moe.bias.shape[0]
        if experts not in self.counts:
            self.counts[experts] = torch.zeros(experts, dtype=torch.int32, device=self.device)
        codes, scales = (views.x_q, views.x_q_scale) if self.numerics.quantise_activations else (None, None)
        self.moe(
            views.x, codes, scales, moe.gate, moe.bias, moe.gate_up, moe.down, moe.shared_gate_up, moe.shared_down, top_k,
            text.routed_scaling_factor, text.swiglu_limit, count, views.y, self.counts[experts],
        )  # fmt: skip

    def run(
        self, block: BlockWeights, topology: Any, residual: Residual, meta: StepMeta, views: Any, attention: Attention,
        engram: Engram | None, ngrams: torch.Tensor | None, at_attention_input: Any = None,
    ) -> None:  # fmt: skip
        """One backbone block. at_attention_input(layer) is called when the streams are those that attention starts from."""
        if topology.engram and engram is not None:
            self.finish_site(residual, views)
            engram(block.engram, ngrams, views)
        self.enter_site(block.attn_site, residual, views)
        if at_attention_input is not None:
            at_attention_input(topology.layer)
        attention(block, topology, meta, views)
        self.enter_site(block.ffn_site, residual, views)
        self.feed_forward(block.moe, topology.is_draft, views, meta.count)
