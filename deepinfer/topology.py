"""Which layer owns a cache, an indexer or an Engram table, and whose it reads.

A consumer reads the nearest source at or before it. The functions are pure; `deepinfer.model_checks` refuses the
configurations for which they make no sense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from deepinfer.model_config import TextConfig


class LayerTopology(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's place in the network. Sources are layer ids; None where ratio is 0 (window attention only)."""

    layer: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    owns_kv: bool
    owns_index_query: bool
    owns_index_key: bool
    builds_pool: bool
    uses_pool: bool
    rope: Literal["plain", "yarn"]
    engram: bool
    draft_target: bool
    is_draft: bool


def nearest_source(layer: int, sources: tuple[int, ...]) -> int | None:
    """The largest source that is at most `layer`, or None."""
    return max((source for source in sources if source <= layer), default=None)


def layer_topologies(text: TextConfig) -> tuple[LayerTopology, ...]:
    """One entry per backbone layer, then one per draft block."""
    index_keys = text.index_k_source_layer_ids or text.kv_source_layer_ids
    pool_source = text.candidate_source_layer_id
    found = []
    for layer, ratio in enumerate(text.compress_ratios):
        is_draft = layer >= text.num_hidden_layers
        compressed = ratio > 0 and not is_draft
        index_source = nearest_source(layer, text.index_source_layer_ids) if compressed else None
        found.append(
            LayerTopology(
                layer=layer,
                ratio=ratio,
                kv_source=nearest_source(layer, text.kv_source_layer_ids) if compressed else None,
                index_source=index_source,
                owns_kv=compressed and layer in text.kv_source_layer_ids,
                owns_index_query=index_source == layer,
                owns_index_key=compressed and layer in index_keys,
                builds_pool=compressed and layer == pool_source,
                uses_pool=compressed and pool_source is not None and layer == index_source and layer > pool_source,
                rope="yarn" if ratio > 0 else "plain",
                engram=not is_draft and layer in text.engram_layer_ids,
                draft_target=not is_draft and layer in text.dspark_target_layer_ids,
                is_draft=is_draft,
            )
        )
    return tuple(found)
