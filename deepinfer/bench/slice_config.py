"""Which layers a slice of a model has, and the configuration of a small model that is that slice.

A layer's kind is what it owns and reads: `window`, `source-r`, `index-r`, `pool-r` or `reuse-r` at compression ratio r. Layers
of one kind do the same work, so a slice with every kind and the model's count of each give the time of the whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from deepinfer.errors import ConfigError
from deepinfer.model_checks import check_model_config
from deepinfer.model_config import ModelConfig
from deepinfer.topology import LayerTopology

ENGRAM_ROWS_PER_HEAD = 50_000
"""Rows of a slice's Engram table for each n-gram size and head at most: a token reads a few rows of any table."""


def layer_kind(topology: LayerTopology) -> str:
    """The kind of a backbone layer."""
    if not topology.ratio:
        return "window"
    if topology.owns_kv:
        return f"source-{topology.ratio}"
    if topology.owns_index_query:
        return f"{'pool' if topology.uses_pool else 'index'}-{topology.ratio}"
    return f"reuse-{topology.ratio}"


def kind_counts(config: ModelConfig) -> dict[str, int]:
    """Layers of each kind, in the order in which the model first has them."""
    return dict(Counter(layer_kind(topology) for topology in config.text.layers))


def replayed_kind_counts(config: ModelConfig) -> dict[str, int]:
    """The same of the layers that a bounded replay runs on every token of a prompt: those before the first of ratio 1."""
    text = config.text
    return dict(Counter(layer_kind(topology) for topology in text.layers[: text.prefill_layers]))


def choose_layers(config: ModelConfig, count: int) -> list[int]:
    """`count` layers of the model, ascending: one of each kind, most frequent first, then by what its share still lacks.

    A layer that reads rows brings its source along. Raises ConfigError where the model has fewer layers, or `count` is 0.
    """
    text = config.text
    if not 1 <= count <= text.num_hidden_layers:
        raise ConfigError("layers", f"{count} is not from 1 to {text.num_hidden_layers}")
    kinds = {topology.layer: layer_kind(topology) for topology in text.layers}
    totals, chosen = Counter(kinds.values()), set()

    def wanted(layer: int) -> tuple[float, int]:
        have = sum(kinds[one] == kinds[layer] for one in chosen)
        return (have / totals[kinds[layer]] if have else -totals[kinds[layer]], layer)

    while len(chosen) < count:
        for layer in sorted(set(kinds) - chosen, key=wanted):
            topology = text.layers[layer]
            needs = {layer, topology.kv_source, topology.index_source} - {None} - chosen
            if topology.uses_pool:
                needs |= {text.candidate_source_layer_id} - chosen
            if len(chosen) + len(needs) <= count:
                chosen |= needs
                break
        else:
            raise ConfigError("layers", f"{count} layers cannot be a slice of this model")
    return sorted(chosen)


@dataclass(frozen=True)
class Slice:
    """A slice of `model`: `layers` are the model's own numbers, `config` a model that has only those, with the experts of
    one of `ranks` expert-parallel ranks."""

    model: ModelConfig
    config: ModelConfig
    layers: tuple[int, ...]
    ranks: int

    @property
    def kinds(self) -> list[str]:
        """Kind of each of the slice's layers."""
        return [layer_kind(topology) for topology in self.config.text.layers]


def experts_on_rank(experts: int, top_k: int, ranks: int) -> int:
    """The share of the largest rank, but no fewer than a token chooses: with e experts of which each token takes top_k, a
    rank of any size sees t * top_k rows for t tokens of its own, spread over its experts, as here."""
    return max(top_k, -(-experts // ranks))


def make_slice(model: ModelConfig, layers: int, ranks: int) -> Slice:
    """The slice of `layers` layers that one of `ranks` ranks holds. Raises ConfigError."""
    text = model.text
    if not 1 <= ranks <= text.n_routed_experts:
        raise ConfigError("ranks", f"{ranks} is not from 1 to the {text.n_routed_experts} routed experts")
    chosen = choose_layers(model, layers)
    place = {layer: at for at, layer in enumerate(chosen)}

    def kept(ids: tuple[int, ...] | None) -> tuple[int, ...]:
        return tuple(place[layer] for layer in ids or () if layer in place)

    drafts = text.num_nextn_predict_layers
    changes: dict[str, Any] = {
        "num_hidden_layers": len(chosen),
        "compress_ratios": tuple(text.compress_ratios[layer] for layer in chosen) + (0,) * drafts,
        "kv_source_layer_ids": kept(text.kv_source_layer_ids),
        "index_source_layer_ids": kept(text.index_source_layer_ids),
        "index_k_source_layer_ids": None,
        "candidate_source_layer_id": place.get(text.candidate_source_layer_id),
        "n_routed_experts": experts_on_rank(text.n_routed_experts, text.num_experts_per_tok, ranks),
        "engram_layer_ids": (0,) if text.engram_layer_ids else (),
        "engram_vocab_size": min(text.engram_vocab_size, ENGRAM_ROWS_PER_HEAD),
        "engram_num_embeddings": None,
        "dspark_target_layer_ids": tuple(range(len(chosen)))[-len(text.dspark_target_layer_ids) :] if drafts else (),
    }
    if drafts:
        changes["dspark_n_routed_experts"] = experts_on_rank(
            text.dspark_n_routed_experts, text.dspark_num_experts_per_tok, ranks
        )
    config = msgspec.structs.replace(model, text=msgspec.structs.replace(text, **changes), vision=None)
    check_model_config(config)
    return Slice(model, config, tuple(chosen), ranks)
