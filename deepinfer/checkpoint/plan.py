"""The byte plan of one rank: what weights, caches, state, workspace and logits take, by arithmetic alone.

Weights are counted in the layout a backend prepares them in: `prepared_nbytes(role, shape, format)` gives its bytes,
and without one the checkpoint's own layout counts. Over `ranks` expert-parallel ranks the routed experts (those of the
draft too) and the rows of the Engram tables are divided, the largest share counts; everything else is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import prod

import msgspec
from deepinfer_hal.weights import canonical_nbytes

from deepinfer.checkpoint.tensors import DTYPE_BYTES, TensorSpec, expected_tensors
from deepinfer.errors import ConfigError
from deepinfer.model.numerics import Numerics
from deepinfer.model.state import BLOCK_TOKENS, StateLayout, plan_state
from deepinfer.model_config import ModelConfig, TextConfig

PreparedNbytes = Callable[[str, tuple[int, ...], str], int]
WEIGHT_GROUPS = (
    "embedding", "attention", "routed experts", "shared experts", "mHC", "Engram", "draft", "vision",
)  # fmt: skip

_FORMAT = {"BF16": "bf16", "F32": "f32", "F8_E4M3": "fp8_block32", "I8": "fp4_row32"}
_BLOCK_PREFIX = re.compile(r"(layers|mtp)\.[0-9]+\.")


class LogicalWeight(msgspec.Struct, frozen=True):
    """A weight as ops see it: parts joined along N, experts stacked. `shape` is [..., N, K], or [n] for a vector.

    `shards_over` is the leading size that is divided over ranks (experts, table rows), or 0.
    """

    role: str
    group: str
    format: str
    shape: tuple[int, ...]
    shards_over: int = 0

    def share(self, ranks: int) -> tuple[int, ...]:
        """Shape of the largest part that one of `ranks` ranks holds."""
        return (-(-self.shards_over // ranks), *self.shape[1:]) if self.shards_over else self.shape


class BytePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank by pool, and the sizes they follow from."""

    ranks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_bytes: int
    slot_bytes: int
    kv_bytes_per_token: float
    weights: dict[str, int]
    kv_bytes: int
    state_bytes: int
    history_bytes: int
    workspace_bytes: int
    logits_bytes: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def total_bytes(self) -> int:
        return (
            self.weight_bytes
            + self.kv_bytes
            + self.state_bytes
            + self.history_bytes
            + self.workspace_bytes
            + self.logits_bytes
        )


def plan_bytes(
    config: ModelConfig,
    *,
    max_model_len: int,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    num_blocks: int | None = None,
    max_backtrack: int = 6,
    ranks: int = 1,
    numerics: Numerics | None = None,
    prepared_nbytes: PreparedNbytes | None = None,
) -> BytePlan:
    """Plan one rank. num_blocks None holds max_num_seqs sequences of max_model_len tokens. Raises ConfigError."""
    text = config.text
    for name, value in (("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs), ("ep", ranks)):
        if value < 1:
            raise ConfigError(name, f"{value} must be at least 1")
    if max_model_len > text.max_position_embeddings:
        limit = text.max_position_embeddings
        raise ConfigError("max_model_len", f"{max_model_len} exceeds the model's max_position_embeddings {limit}")
    if ranks > text.n_routed_experts:
        raise ConfigError("ep", f"{ranks} ranks exceed the {text.n_routed_experts} routed experts")
    numerics = numerics or Numerics(main_format=text.main_kv_format)
    layout = plan_state(text, numerics, max_backtrack)
    if num_blocks is None:
        num_blocks = max_num_seqs * -(-max_model_len // BLOCK_TOKENS)
    return BytePlan(
        ranks=ranks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
        slot_bytes=layout.slot_bytes,
        kv_bytes_per_token=kv_bytes_per_token(layout),
        weights=_weight_bytes(config, ranks, prepared_nbytes or _checkpoint_nbytes),
        kv_bytes=num_blocks * layout.block_bytes,
        state_bytes=max_num_seqs * layout.slot_bytes,
        history_bytes=max_num_seqs * max_model_len * 4,
        workspace_bytes=workspace_bytes(text, numerics, max_num_batched_tokens, max_model_len),
        logits_bytes=max_num_seqs * text.vocab_size * 4,
    )


def kv_bytes_per_token(layout: StateLayout) -> float:
    """Growth of the paged caches per token of a sequence, without alignment between the parts of a block."""
    return sum(source.main_bytes + source.index_bytes for source in layout.sources) / BLOCK_TOKENS


def logical_weights(specs: Iterable[TensorSpec], text: TextConfig) -> list[LogicalWeight]:
    """Join the tensors of a checkpoint into the weights that are prepared, in the order of the network."""
    parts: dict[tuple[str, str], list[TensorSpec]] = {}
    for spec in specs:
        if spec.dtype == "F8_E8M0":
            continue
        prefix = _BLOCK_PREFIX.match(spec.name)
        joined = len(spec.shape) == 2 and spec.role not in ("engram_gate", "mhc_fn", "vision")
        key = (prefix.group(0) if prefix else "", spec.role) if joined else (spec.name, spec.role)
        parts.setdefault(key, []).append(spec)
    return [_join(members, text) for members in parts.values()]


def _join(members: list[TensorSpec], text: TextConfig) -> LogicalWeight:
    first = members[0]
    role, group, form = first.role, first.group, _FORMAT[first.dtype]
    if len(first.shape) != 2:
        return LogicalWeight(role, group, form, first.shape)
    columns = first.shape[1] * (2 if form == "fp4_row32" else 1)
    rows = sum(spec.shape[0] for spec in members)
    if role in ("experts_gate_up", "experts_down"):
        experts = len(members) // (2 if role == "experts_gate_up" else 1)
        return LogicalWeight(role, group, form, (experts, rows // experts, columns), experts)
    if role == "engram_table":
        return LogicalWeight(role, group, "fp8_row32", (rows, columns), rows)
    if role == "wo_a":
        return LogicalWeight(role, group, form, (text.o_groups, text.o_lora_rank, columns))
    return LogicalWeight(role, group, form, (rows, columns))


def _weight_bytes(config: ModelConfig, ranks: int, prepared_nbytes: PreparedNbytes) -> dict[str, int]:
    """Bytes by group. Vectors, mHC parameters and vision weights are kept as stored, whatever the backend."""
    found = dict.fromkeys(WEIGHT_GROUPS, 0)
    for weight in logical_weights(expected_tensors(config).values(), config.text):
        as_stored = len(weight.shape) == 1 or weight.role in ("engram_gate", "mhc_fn", "vision")
        if as_stored:
            found[weight.group] += prod(weight.shape) * (4 if weight.format == "f32" else 2)
        else:
            found[weight.group] += prepared_nbytes(weight.role, weight.share(ranks), weight.format)
    return {group: nbytes for group, nbytes in found.items() if nbytes}


def _checkpoint_nbytes(role: str, shape: tuple[int, ...], format: str) -> int:
    return canonical_nbytes(format, shape)


def workspace_bytes(text: TextConfig, numerics: Numerics, rows: int, max_model_len: int) -> int:
    """Step buffers for `rows` token rows, and the two rotation tables over max_model_len positions.

    Index scores are float32 per visible row; a step that would need more than 64 MiB of them scores its rows in pieces.
    """
    tables = 2 * max_model_len * text.qk_rope_head_dim * 4
    scored = max_model_len // min((r for r in text.compress_ratios if r), default=1) if text.kv_source_layer_ids else 0
    scores = min(rows * scored * 4, max(64 << 20, scored * 4))
    return tables + scores + rows * _row_bytes(text, numerics)


def _row_bytes(text: TextConfig, numerics: Numerics) -> int:
    """Step buffers of one token row, index scores apart."""
    wide = 2 if numerics.dtype_name == "bf16" else 4
    hidden, streams, heads_width = text.hidden_size, text.hc_mult, text.num_attention_heads * text.head_dim

    def activation(width: int) -> int:
        """A dense activation, with its codes and scales where activations are quantised."""
        return width * wide + (width + width // 32 if numerics.quantise_activations else 0)

    residual = streams * hidden * wide + activation(hidden) + hidden * wide + 4 * (2 * streams + streams * streams)
    attention = (text.q_lora_rank + text.head_dim) * wide + activation(text.q_lora_rank) + 2 * text.head_dim * wide
    attention += heads_width * wide + activation(heads_width) + activation(text.o_groups * text.o_lora_rank)
    index = text.index_n_heads * (text.index_head_dim * wide + wide) + text.index_n_heads * text.index_head_dim
    index += 4 * (text.index_topk + text.candidate_topk_blocks)
    compressor = 2 * text.head_dim * 4 + text.head_dim * wide
    routed = text.num_experts_per_tok
    moe = routed * (activation(hidden) + 2 * text.moe_intermediate_size * wide + activation(text.moe_intermediate_size))
    moe += routed * hidden * wide + 4 * text.n_routed_experts + 12 * routed
    shared = 2 * text.moe_intermediate_size * wide + activation(text.moe_intermediate_size) + hidden * wide
    engram = 0
    if text.engram_layer_ids:
        engram = activation(text.engram_width) + (streams + 1) * hidden * wide + 8 * text.engram_width
    draft = (len(text.dspark_target_layer_ids) + 1) * activation(hidden) if text.draft_layers else 0
    return residual + attention + index + compressor + moe + shared + engram + draft + 64


def disk_bytes(config: ModelConfig) -> tuple[int, int]:
    """(tensors, bytes) of a whole checkpoint with this configuration."""
    specs = expected_tensors(config).values()
    return len(specs), sum(prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in specs)
