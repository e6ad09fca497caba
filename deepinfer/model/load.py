"""From a checkpoint's tensors to the prepared weights of every block.

Each role is joined, prepared and released before the next is read, so loading holds at most one prepared role beyond the
result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, concatenate

from deepinfer.errors import ConfigError

Read = Callable[[str], torch.Tensor]
"""name -> raw tensor: uint8 for FP8, FP4 and scales, bfloat16 or float32 otherwise."""

Prepare = Callable[[str, CanonicalWeight], WeightHandle]


@dataclass
class SiteWeights:
    """mHC parameters of one residual site, float32, and the norm that follows its pre-mix."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor


@dataclass
class IndexerWeights:
    """Query side of a lightning indexer, and its key side where the layer owns it."""

    wq_b: WeightHandle
    weights_proj: WeightHandle
    wk: WeightHandle | None = None
    k_norm: torch.Tensor | None = None


@dataclass
class CompressorWeights:
    """Compressor of a KV source layer; wgate is None at ratio 1."""

    wkv: WeightHandle
    wgate: WeightHandle | None
    norm: torch.Tensor


@dataclass
class MoeWeights:
    """Router, routed experts and the shared expert of a layer."""

    gate: WeightHandle
    bias: torch.Tensor
    gate_up: WeightHandle
    down: WeightHandle
    shared_gate_up: WeightHandle
    shared_down: WeightHandle


@dataclass
class EngramWeights:
    """One Engram layer: table, projection, gate weights and its hash constants (int64)."""

    table: WeightHandle
    wkv: WeightHandle
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor


@dataclass
class BlockWeights:
    """One transformer block, of the backbone or of the draft."""

    attn_site: SiteWeights
    ffn_site: SiteWeights
    attn_in: WeightHandle
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    wq_b: WeightHandle
    sink: torch.Tensor
    wo_a: WeightHandle
    wo_b: WeightHandle
    moe: MoeWeights
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None
    engram: EngramWeights | None = None
    draft_wkv: WeightHandle | None = None


@dataclass
class DraftWeights:
    """DSpark: the projection of target features, the blocks, and the Markov and confidence heads."""

    main_proj: WeightHandle
    main_norm: torch.Tensor
    blocks: list[BlockWeights]
    norm: torch.Tensor
    markov_embed: WeightHandle
    markov_head: WeightHandle
    confidence: torch.Tensor


@dataclass
class ModelWeights:
    """All weights of a text model. vision: raw tensors that were recognised and loaded, never used."""

    embedding: WeightHandle
    blocks: list[BlockWeights]
    norm: torch.Tensor
    head: WeightHandle
    draft: DraftWeights | None
    vision: dict[str, torch.Tensor]


class WeightLoader:
    """Reads and prepares weights for one device. `stream_dtype` is the dtype of gate vectors that ops take as streams."""

    def __init__(self, config: Any, read: Read, prepare: Prepare, device: torch.device, stream_dtype: torch.dtype) -> None:
        self.text = config.text
        self.read, self.prepare, self.device, self.stream_dtype = read, prepare, device, stream_dtype

    def vector(self, name: str) -> torch.Tensor:
        """A copy, because a kept view would hold its whole shard."""
        return self.read(name).to(self.device, copy=True)

    def plain(self, role: str, *names: str) -> WeightHandle:
        """A BF16 or F32 matrix, several joined along N."""
        parts = [self.read(name) for name in names]
        kind = "f32" if parts[0].dtype == torch.float32 else "bf16"
        return self.prepare(role, concatenate([CanonicalWeight(kind, part) for part in parts]))

    def fp8(self, role: str, *names: str) -> WeightHandle:
        """An FP8 matrix with 32 x 32 scales, several joined along N."""
        parts = [CanonicalWeight("fp8_block32", self.read(f"{n}.weight"), self.read(f"{n}.scale")) for n in names]
        return self.prepare(role, concatenate(parts))

    def grouped_fp8(self, role: str, name: str, groups: int) -> WeightHandle:
        """[G * N, K] on disk as [G, N, K]; a scale block that spans groups is repeated for each.

        ConfigError when a group would begin inside a block and reach into the next: its own blocks would be others.
        """
        values, scales = self.read(f"{name}.weight"), self.read(f"{name}.scale")
        rows = values.shape[0] // groups
        if rows % 32 and 32 % rows:
            raise ConfigError("text_config.o_lora_rank", f"{rows} rows a group neither fill nor divide scale blocks of 32 rows")
        blocks = max(rows // 32, 1)
        first = torch.arange(groups) * rows // 32
        index = first[:, None] + torch.arange(blocks)[None, :]
        return self.prepare(role, CanonicalWeight("fp8_block32", values.view(groups, rows, -1), scales[index]))

    def experts(self, role: str, prefix: str, count: int, *matrices: str) -> WeightHandle:
        """FP4 experts stacked on a leading dimension, their matrices joined along N."""
        stacked = []
        for expert in range(count):
            names = [f"{prefix}experts.{expert}.{matrix}" for matrix in matrices]
            parts = [CanonicalWeight("fp4_row32", _bytes(self.read(f"{n}.weight")), self.read(f"{n}.scale")) for n in names]
            stacked.append(concatenate(parts))
        values = torch.stack([part.values for part in stacked])
        scales = torch.stack([part.scales for part in stacked])
        return self.prepare(role, CanonicalWeight("fp4_row32", values, scales))

    def site(self, prefix: str, which: str) -> SiteWeights:
        read = self.vector
        hc = f"{prefix}hc_{which}"
        return SiteWeights(read(f"{hc}_fn"), read(f"{hc}_base"), read(f"{hc}_scale"), read(f"{prefix}{which}_norm.weight"))

    def moe(self, prefix: str, experts: int) -> MoeWeights:
        shared = f"{prefix}shared_experts."
        return MoeWeights(
            gate=self.plain("gate", f"{prefix}gate.weight"),
            bias=self.vector(f"{prefix}gate.bias"),
            gate_up=self.experts("experts_gate_up", prefix, experts, "w1", "w3"),
            down=self.experts("experts_down", prefix, experts, "w2"),
            shared_gate_up=self.fp8("shared_gate_up", f"{shared}w1", f"{shared}w3"),
            shared_down=self.fp8("shared_down", f"{shared}w2"),
        )

    def block(self, prefix: str, topology: Any) -> BlockWeights:
        text, attn = self.text, f"{prefix}attn."
        experts = text.dspark_n_routed_experts if topology.is_draft else text.n_routed_experts
        block = BlockWeights(
            attn_site=self.site(prefix, "attn"),
            ffn_site=self.site(prefix, "ffn"),
            attn_in=self.fp8("attn_in", f"{attn}wq_a", f"{attn}wkv"),
            q_norm=self.vector(f"{attn}q_norm.weight"),
            kv_norm=self.vector(f"{attn}kv_norm.weight"),
            wq_b=self.fp8("wq_b", f"{attn}wq_b"),
            sink=self.vector(f"{attn}attn_sink"),
            wo_a=self.grouped_fp8("wo_a", f"{attn}wo_a", text.o_groups),
            wo_b=self.fp8("wo_b", f"{attn}wo_b"),
            moe=self.moe(f"{prefix}ffn.", experts),
        )
        if topology.owns_kv:
            gate = self.plain("compressor_wgate", f"{attn}compressor.wgate.weight") if topology.ratio > 1 else None
            wkv = self.plain("compressor_wkv", f"{attn}compressor.wkv.weight")
            block.compressor = CompressorWeights(wkv, gate, self.vector(f"{attn}compressor.norm.weight"))
        if topology.owns_index_query:
            block.indexer = self.indexer(f"{attn}indexer.", topology.owns_index_key)
        if topology.engram:
            block.engram = self.engram(f"{prefix}engram.", topology.layer)
        if topology.is_draft:
            block.draft_wkv = self.fp8("draft_wkv", f"{attn}wkv")
        return block

    def indexer(self, prefix: str, owns_key: bool) -> IndexerWeights:
        weights = IndexerWeights(
            self.fp8("indexer_wq_b", f"{prefix}wq_b"), self.plain("indexer_weights_proj", f"{prefix}weights_proj.weight")
        )
        if owns_key:
            weights.wk = self.plain("indexer_wk", f"{prefix}wk.weight")
            weights.k_norm = self.vector(f"{prefix}k_norm.weight")
        return weights

    def engram(self, prefix: str, layer: int) -> EngramWeights:
        from deepinfer.engram_layout import engram_multipliers

        text = self.text
        table = next(one for one in text.engram_tables if one.layer == layer)
        multipliers = engram_multipliers(layer, text.engram_max_ngram_size, text.engram_compressed_vocab_size)

        def constants(values: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        rows = CanonicalWeight("fp8_row32", self.read(f"{prefix}embed.weight"), self.read(f"{prefix}embed.scale"))
        return EngramWeights(
            table=self.prepare("engram_table", rows),
            wkv=self.fp8("engram_wkv", f"{prefix}wkv"),
            q_weight=self.vector(f"{prefix}q_weight").to(self.stream_dtype),
            k_weight=self.vector(f"{prefix}k_weight").to(self.stream_dtype),
            multipliers=constants(multipliers),
            primes=constants(table.primes),
            offsets=constants(table.offsets),
        )

    def draft(self) -> DraftWeights | None:
        layers = self.text.draft_layers
        if not layers:
            return None
        last = f"mtp.{len(layers) - 1}."
        return DraftWeights(
            main_proj=self.fp8("main_proj", "mtp.0.main_proj"),
            main_norm=self.vector("mtp.0.main_norm.weight"),
            blocks=[self.block(f"mtp.{i}.", topology) for i, topology in enumerate(layers)],
            norm=self.vector(f"{last}norm.weight"),
            markov_embed=self.plain("markov_embed", f"{last}markov_head.embed.weight"),
            markov_head=self.plain("markov_head", f"{last}markov_head.head.weight"),
            confidence=self.vector(f"{last}confidence_head.proj.weight").to(self.stream_dtype),
        )

    def model(self, vision_names: tuple[str, ...] = ()) -> ModelWeights:
        return ModelWeights(
            embedding=self.plain("embedding", "embed.weight"),
            blocks=[self.block(f"layers.{t.layer}.", t) for t in self.text.layers],
            norm=self.vector("norm.weight"),
            head=self.plain("head", "head.weight"),
            draft=self.draft(),
            vision={name: self.read(name) for name in vision_names},
        )


def _bytes(packed: torch.Tensor) -> torch.Tensor:
    return packed if packed.dtype == torch.uint8 else packed.view(torch.uint8)


def tracked_weight_bytes(weights: Any) -> int:
    """Bytes held by the handles and tensors of a (nested) weights dataclass, each storage once."""
    seen: dict[tuple[str, int], int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, WeightHandle):
            seen["handle", id(value)] = value.nbytes
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen["storage", storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif hasattr(value, "__dataclass_fields__"):
            visit(list(vars(value).values()))

    visit(weights)
    return sum(seen.values())
