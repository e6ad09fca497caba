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
from deepinfer.checkpoint.workspace import logits_bytes, workspace_bytes
from deepinfer.config import MOST_ROWS
from deepinfer.errors import ConfigError
from deepinfer.model.graph_plan import GraphPlan, plan_graphs
from deepinfer.model.numerics import Numerics
from deepinfer.model.state import BLOCK_TOKENS, StateLayout, plan_state
from deepinfer.model_config import ModelConfig, TextConfig

PreparedNbytes = Callable[[str, tuple[int, ...], str], int]
WEIGHT_GROUPS = (
    "embedding", "attention", "routed experts", "shared experts", "mHC", "Engram", "draft", "vision",
)  # fmt: skip

MIN_LOGIT_ROWS = 64
"""Logit rows that an engine holds even for fewer sequences, so that prompt log-probabilities come in useful pieces."""

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
    """Bytes of one rank by pool, and the sizes they follow from. graphs: what steps are captured into, or None."""

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
    graphs: GraphPlan | None = None

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
            + (self.graphs.total_bytes if self.graphs else 0)
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
    with_draft: bool = False,
    with_graphs: bool = False,
    max_prompt_graph_tokens: int = 0,
    graph_workspace_bytes: int = 0,
    numerics: Numerics | None = None,
    prepared_nbytes: PreparedNbytes | None = None,
) -> BytePlan:
    """Plan one rank. Raises ConfigError.

    num_blocks: None holds max_num_seqs sequences of max_model_len tokens. with_draft: also the draft's step buffers.
    with_graphs: also the captured steps of a backend that has graphs, those with prompts up to max_prompt_graph_tokens rows,
    whose calls take graph_workspace_bytes each (deepinfer_hal.backend.Capabilities).
    """
    text = config.text
    for name, value in (("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs), ("ep", ranks)):
        if value < 1:
            raise ConfigError(name, f"{value} must be at least 1")
    if not 0 <= max_prompt_graph_tokens <= MOST_ROWS:
        raise ConfigError("max_prompt_graph_tokens", f"{max_prompt_graph_tokens} must be 0 (none) to {MOST_ROWS}")
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
        weights=_weight_bytes(config, ranks, numerics, prepared_nbytes or _checkpoint_nbytes),
        kv_bytes=num_blocks * layout.block_bytes,
        state_bytes=max_num_seqs * layout.slot_bytes,
        history_bytes=max_num_seqs * max_model_len * 4,
        workspace_bytes=workspace_bytes(
            text,
            numerics,
            layout,
            max_num_seqs,
            max(max_num_batched_tokens, max_num_seqs),
            max_model_len + max_backtrack,
            with_draft,
        ),
        logits_bytes=logits_bytes(text, numerics, max(max_num_seqs, MIN_LOGIT_ROWS)),
        graphs=plan_graphs(
            text, numerics, max_num_seqs, max_model_len,
            min(max_prompt_graph_tokens, max(max_num_batched_tokens, max_num_seqs)), graph_workspace_bytes,
        )  # fmt: skip
        if with_graphs
        else None,
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


def _weight_bytes(
    config: ModelConfig, ranks: int, numerics: Numerics, prepared_nbytes: PreparedNbytes
) -> dict[str, int]:
    """Bytes by group. Vectors, mHC parameters and vision weights are kept as stored, whatever the backend; those that
    ops take as streams have the streams' type. Each draft block keeps its wkv once more, for the target's features."""
    found = dict.fromkeys(WEIGHT_GROUPS, 0)
    for weight in logical_weights(expected_tensors(config).values(), config.text):
        if weight.role in ("engram_gate", "confidence_proj"):
            found[weight.group] += prod(weight.shape) * numerics.stream_dtype.itemsize
        elif len(weight.shape) == 1 or weight.role in ("mhc_fn", "vision"):
            found[weight.group] += prod(weight.shape) * (4 if weight.format == "f32" else 2)
        else:
            found[weight.group] += prepared_nbytes(weight.role, weight.share(ranks), weight.format)
    draft_wkv = prepared_nbytes("draft_wkv", (config.text.head_dim, config.text.hidden_size), "fp8_block32")
    found["draft"] += len(config.text.draft_layers) * draft_wkv
    return {group: nbytes for group, nbytes in found.items() if nbytes}


def _checkpoint_nbytes(role: str, shape: tuple[int, ...], format: str) -> int:
    return canonical_nbytes(format, shape)


def disk_bytes(config: ModelConfig) -> tuple[int, int]:
    """(tensors, bytes) of a whole checkpoint with this configuration."""
    specs = expected_tensors(config).values()
    return len(specs), sum(prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in specs)
