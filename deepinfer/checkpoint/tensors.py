"""The table of tensors that a checkpoint must hold, from its configuration alone.

Names are those of the release, without a `model.` prefix. `X.scale` goes with `X.weight`. Storage forms:
fp8 = F8_E4M3 [N, K] with F8_E8M0 scales [ceil(N/32), ceil(K/32)]; fp4 = I8 [N, K/2] with F8_E8M0 scales [N, K/32];
fp8 rows (Engram tables) = F8_E4M3 [rows, d] with F8_E8M0 scales [rows, d/32].
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

import msgspec

from deepinfer.model_config import ModelConfig, TextConfig, VisionConfig
from deepinfer.topology import LayerTopology

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
GROUP = 32

# Copies of the shared embedding and head that some writers add to the draft blocks; they are not read.
IGNORED_NAME = re.compile(r"mtp\.[0-9]+\.(embed|head)\.weight")


class TensorSpec(msgspec.Struct, frozen=True):
    """One expected tensor. `role` is the prepared weight it becomes a part of, `group` its line in the byte plan.

    An optional tensor may be absent: it is read only by a part of the model that this checkpoint does not have.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    group: str
    optional: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint with this configuration, by name, in the order of the network."""
    return {spec.name: spec for spec in _all_specs(config)}


def _all_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    text = config.text
    yield TensorSpec("embed.weight", (text.vocab_size, text.hidden_size), "BF16", "embedding", "embedding")
    for topology in text.layers:
        prefix = f"layers.{topology.layer}."
        if topology.engram:
            yield from _engram(text, topology.layer, prefix)
        yield from _block(text, prefix, topology, config.vision is None)
    yield TensorSpec("norm.weight", (text.hidden_size,), "BF16", "norm", "embedding")
    yield TensorSpec("head.weight", (text.vocab_size, text.hidden_size), "BF16", "head", "embedding")
    for index, topology in enumerate(text.draft_layers):
        yield from _block(text, f"mtp.{index}.", topology, config.vision is None)
    if text.draft_layers:
        yield from _draft_heads(text)
    if config.vision is not None:
        yield from _vision(config.vision, text.hidden_size)


def _fp8(name: str, n: int, k: int, role: str, group: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (n, k), "F8_E4M3", role, group)
    yield TensorSpec(f"{name}.scale", (-(-n // GROUP), -(-k // GROUP)), "F8_E8M0", role, group)


def _fp4(name: str, n: int, k: int, role: str, group: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (n, k // 2), "I8", role, group)
    yield TensorSpec(f"{name}.scale", (n, k // GROUP), "F8_E8M0", role, group)


def _block(text: TextConfig, prefix: str, topology: LayerTopology, text_only: bool) -> Iterator[TensorSpec]:
    """One transformer block, of the backbone or of the draft."""
    hidden = text.hidden_size
    draft = "draft" if topology.is_draft else ""
    yield TensorSpec(f"{prefix}attn_norm.weight", (hidden,), "BF16", "norm", draft or "attention")
    yield TensorSpec(f"{prefix}ffn_norm.weight", (hidden,), "BF16", "norm", draft or "shared experts")
    yield from _hyper_connections(text, prefix, draft or "mHC")
    yield from _attention(text, f"{prefix}attn.", draft or "attention")
    if topology.owns_kv:
        yield from _compressor(text, f"{prefix}attn.compressor.", topology.ratio)
    if topology.owns_index_query:
        yield from _indexer(text, f"{prefix}attn.indexer.", topology.owns_index_key)
    experts = text.dspark_n_routed_experts if topology.is_draft else text.n_routed_experts
    yield from _experts(text, f"{prefix}ffn.", experts, draft, text_only)


def _hyper_connections(text: TextConfig, prefix: str, group: str) -> Iterator[TensorSpec]:
    streams = text.hc_mult
    mixes = (2 + streams) * streams
    for site in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}hc_{site}_fn", (mixes, streams * text.hidden_size), "F32", "mhc_fn", group)
        yield TensorSpec(f"{prefix}hc_{site}_base", (mixes,), "F32", "mhc_base", group)
        yield TensorSpec(f"{prefix}hc_{site}_scale", (3,), "F32", "mhc_scale", group)


def _attention(text: TextConfig, prefix: str, group: str) -> Iterator[TensorSpec]:
    hidden, heads, head_dim = text.hidden_size, text.num_attention_heads, text.head_dim
    group_width = heads // text.o_groups * head_dim
    yield from _fp8(f"{prefix}wq_a", text.q_lora_rank, hidden, "attn_in", group)
    yield from _fp8(f"{prefix}wkv", head_dim, hidden, "attn_in", group)
    yield TensorSpec(f"{prefix}q_norm.weight", (text.q_lora_rank,), "BF16", "norm", group)
    yield TensorSpec(f"{prefix}kv_norm.weight", (head_dim,), "BF16", "norm", group)
    yield from _fp8(f"{prefix}wq_b", heads * head_dim, text.q_lora_rank, "wq_b", group)
    yield TensorSpec(f"{prefix}attn_sink", (heads,), "F32", "attn_sink", group)
    yield from _fp8(f"{prefix}wo_a", text.o_groups * text.o_lora_rank, group_width, "wo_a", group)
    yield from _fp8(f"{prefix}wo_b", hidden, text.o_groups * text.o_lora_rank, "wo_b", group)


def _compressor(text: TextConfig, prefix: str, ratio: int) -> Iterator[TensorSpec]:
    shape = (text.head_dim, text.hidden_size)
    yield TensorSpec(f"{prefix}wkv.weight", shape, "BF16", "compressor_wkv", "attention")
    if ratio > 1:
        yield TensorSpec(f"{prefix}wgate.weight", shape, "BF16", "compressor_wgate", "attention")
    yield TensorSpec(f"{prefix}norm.weight", (text.head_dim,), "BF16", "norm", "attention")


def _indexer(text: TextConfig, prefix: str, owns_key: bool) -> Iterator[TensorSpec]:
    heads, width = text.index_n_heads, text.index_head_dim
    yield from _fp8(f"{prefix}wq_b", heads * width, text.q_lora_rank, "indexer_wq_b", "attention")
    yield TensorSpec(
        f"{prefix}weights_proj.weight", (heads, text.hidden_size), "BF16", "indexer_weights_proj", "attention"
    )
    if owns_key:
        yield TensorSpec(f"{prefix}wk.weight", (width, text.head_dim), "BF16", "indexer_wk", "attention")
        yield TensorSpec(f"{prefix}k_norm.weight", (width,), "BF16", "norm", "attention")


def _experts(text: TextConfig, prefix: str, experts: int, draft: str, text_only: bool) -> Iterator[TensorSpec]:
    hidden, inner = text.hidden_size, text.moe_intermediate_size
    shared, routed = draft or "shared experts", draft or "routed experts"
    yield TensorSpec(f"{prefix}gate.weight", (experts, hidden), "BF16", "gate", shared)
    yield TensorSpec(f"{prefix}gate.bias", (experts,), "F32", "gate_bias", shared)
    yield TensorSpec(f"{prefix}gate.bias_vl", (experts,), "F32", "gate_bias_vl", shared, optional=text_only)
    for name, n, k, part in (
        ("w1", inner, hidden, "gate_up"),
        ("w3", inner, hidden, "gate_up"),
        ("w2", hidden, inner, "down"),
    ):
        yield from _fp8(f"{prefix}shared_experts.{name}", n, k, f"shared_{part}", shared)
        for expert in range(experts):
            yield from _fp4(f"{prefix}experts.{expert}.{name}", n, k, f"experts_{part}", routed)


def _engram(text: TextConfig, layer: int, prefix: str) -> Iterator[TensorSpec]:
    rows = next(table.rows for table in text.engram_tables if table.layer == layer)
    width, hidden, streams = text.engram_head_dim, text.hidden_size, text.hc_mult
    yield TensorSpec(f"{prefix}engram.embed.weight", (rows, width), "F8_E4M3", "engram_table", "Engram")
    yield TensorSpec(f"{prefix}engram.embed.scale", (rows, width // GROUP), "F8_E8M0", "engram_table", "Engram")
    yield from _fp8(f"{prefix}engram.wkv", (streams + 1) * hidden, text.engram_width, "engram_wkv", "Engram")
    for name in ("q_weight", "k_weight"):
        yield TensorSpec(f"{prefix}engram.{name}", (streams, hidden), "BF16", "engram_gate", "Engram")


def _draft_heads(text: TextConfig) -> Iterator[TensorSpec]:
    hidden, rank, last = text.hidden_size, text.dspark_markov_rank, f"mtp.{len(text.draft_layers) - 1}."
    yield from _fp8("mtp.0.main_proj", hidden, len(text.dspark_target_layer_ids) * hidden, "main_proj", "draft")
    yield TensorSpec("mtp.0.main_norm.weight", (hidden,), "BF16", "norm", "draft")
    yield TensorSpec(f"{last}norm.weight", (hidden,), "BF16", "norm", "draft")
    yield TensorSpec(f"{last}markov_head.embed.weight", (text.vocab_size, rank), "BF16", "markov_embed", "draft")
    yield TensorSpec(f"{last}markov_head.head.weight", (text.vocab_size, rank), "BF16", "markov_head", "draft")
    yield TensorSpec(f"{last}confidence_head.proj.weight", (1, hidden + rank), "BF16", "confidence_proj", "draft")


def _vision(vision: VisionConfig, text_hidden: int) -> Iterator[TensorSpec]:
    width, inner = vision.hidden_size, vision.intermediate_size
    folded = width * vision.downsample_ratio**2

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, shape, "BF16", "vision", "vision")

    for marker in ("image_start", "image_end", "image_newline"):
        yield spec(marker, text_hidden)
    yield spec("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield spec("vision.patch_embed.proj.bias", width)
    for index in range(vision.num_hidden_layers):
        block = f"vision.blocks.{index}."
        yield spec(f"{block}norm1.weight", width)
        yield spec(f"{block}norm2.weight", width)
        yield spec(f"{block}attn.wqkv.weight", 3 * width, width)
        yield spec(f"{block}attn.wqkv.bias", 3 * width)
        yield spec(f"{block}attn.wo.weight", width, width)
        yield spec(f"{block}attn.wo.bias", width)
        yield spec(f"{block}mlp.w1.weight", 2 * inner, width)
        yield spec(f"{block}mlp.w2.weight", width, inner)
    yield spec("vision.norm.weight", width)
    yield spec("aligner.w1.weight", text_hidden, folded)
    yield spec("aligner.w1.bias", text_hidden)
    yield spec("aligner.w2.weight", text_hidden, text_hidden)
    yield spec("aligner.w2.bias", text_hidden)
