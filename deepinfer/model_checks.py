"""Impossible or unsupported combinations in a model configuration: one check per idea, each naming the key's path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.errors import ConfigError
from deepinfer.topology import nearest_source

if TYPE_CHECKING:
    from deepinfer.model_config import ModelConfig, TextConfig, VisionConfig

BLOCK_TOKENS = 128
QUANT_GROUP = 32

# Upper limits keep a damaged file from planning for hours; each is far above any model of this architecture.
_LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "q_lora_rank": 1 << 18,
    "o_groups": 1 << 12,
    "o_lora_rank": 1 << 18,
    "sliding_window": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "moe_intermediate_size": 1 << 20,
    "n_routed_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "index_n_heads": 1 << 12,
    "index_head_dim": 1 << 14,
    "index_topk": 1 << 20,
    "candidate_topk_blocks": 1 << 20,
    "candidate_block_size": 1 << 10,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
}
_DRAFT_LIMITS = {
    "num_nextn_predict_layers": 64,
    "dspark_block_size": 64,
    "dspark_markov_rank": 1 << 16,
    "dspark_n_routed_experts": 1 << 14,
    "dspark_num_experts_per_tok": 1 << 10,
}
_ENGRAM_LIMITS = {
    "engram_max_ngram_size": 16,
    "engram_n_heads": 256,
    "engram_head_dim": 1 << 14,
    "engram_vocab_size": 1 << 40,
    "engram_compressed_vocab_size": 1 << 24,
}
_VISION_LIMITS = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 18,
    "num_attention_heads": 1 << 10,
    "intermediate_size": 1 << 20,
    "patch_size": 1 << 10,
    "downsample_ratio": 64,
}
_FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "gate_temp": 1.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "hc_shifted": True,
    "dspark_target_attn_input": True,
}


def check_model_config(config: ModelConfig) -> None:
    """Raise ConfigError for the first combination that the architecture does not allow."""
    text = config.text
    if "DeepseekV41ForCausalLM" not in config.architectures:
        raise ConfigError("architectures", f"{list(config.architectures)} is not ['DeepseekV41ForCausalLM']")
    if config.quantization.weight_block_size != (QUANT_GROUP, QUANT_GROUP):
        raise ConfigError(
            "quantization_config.weight_block_size", f"{list(config.quantization.weight_block_size)} is not [32, 32]"
        )
    for key, only in _FIXED.items():
        if getattr(text, key) != only:
            raise _text_error(key, f"{getattr(text, key)!r} is not supported: this architecture has {only!r}")
    _check_limits(text, "text_config", _LIMITS)
    _check_numbers(text)
    _check_widths(text)
    _check_compression(text)
    _check_pool(text)
    _check_engram(text)
    _check_draft(text)
    _check_token_ids(config)
    if config.vision is not None:
        _check_vision(config.vision)


def _text_error(key: str, message: str) -> ConfigError:
    return ConfigError(f"text_config.{key}", message)


def _check_limits(part: TextConfig | VisionConfig, path: str, limits: dict[str, int]) -> None:
    for key, limit in limits.items():
        value = getattr(part, key)
        if not 1 <= value <= limit:
            raise ConfigError(f"{path}.{key}", f"{value} is out of range: 1 to {limit}")


def _check_numbers(text: TextConfig) -> None:
    for key in ("rms_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "swiglu_limit", "routed_scaling_factor"):
        if not 0 < getattr(text, key) < 1e30:
            raise _text_error(key, f"{getattr(text, key)} must be positive and finite")
    yarn = text.rope_scaling
    if not (1 <= yarn.factor < 1e6 and 0 < yarn.beta_slow < yarn.beta_fast < 1e6):
        raise _text_error("rope_scaling", "needs factor >= 1 and 0 < beta_slow < beta_fast")
    if not 1 <= yarn.original_max_position_embeddings <= 1 << 30:
        raise _text_error("rope_scaling.original_max_position_embeddings", "must be from 1 to 2^30")


def _check_widths(text: TextConfig) -> None:
    """Quantised inputs come in groups of 32 columns; rotated parts are even and inside their heads."""
    widths = {
        "hidden_size": text.hidden_size,
        "head_dim": text.head_dim,
        "q_lora_rank": text.q_lora_rank,
        "moe_intermediate_size": text.moe_intermediate_size,
        "index_head_dim": text.index_head_dim,
    }
    for key, width in widths.items():
        if width % QUANT_GROUP:
            raise _text_error(key, f"{width} is not a multiple of 32, the quantisation group")
    if text.num_attention_heads % text.o_groups:
        raise _text_error("o_groups", f"{text.o_groups} does not divide num_attention_heads {text.num_attention_heads}")
    if text.o_groups * text.o_lora_rank % QUANT_GROUP:
        raise _text_error(
            "o_lora_rank", f"o_groups * o_lora_rank = {text.o_groups * text.o_lora_rank} is not a multiple of 32"
        )
    for key in ("head_dim", "index_head_dim"):
        if text.qk_rope_head_dim > getattr(text, key):
            raise _text_error("qk_rope_head_dim", f"{text.qk_rope_head_dim} exceeds {key} {getattr(text, key)}")
    if text.qk_rope_head_dim % 2:
        raise _text_error("qk_rope_head_dim", f"{text.qk_rope_head_dim} is odd: rotation works on pairs")
    if text.num_experts_per_tok > text.n_routed_experts:
        raise _text_error(
            "num_experts_per_tok", f"{text.num_experts_per_tok} exceeds n_routed_experts {text.n_routed_experts}"
        )


def _check_layer_list(key: str, layers: tuple[int, ...], limit: int) -> None:
    if list(layers) != sorted(set(layers)):
        raise _text_error(key, f"{list(layers)} is not strictly ascending")
    for layer in layers:
        if not 0 <= layer < limit:
            raise _text_error(key, f"layer {layer} does not exist: layers are 0 to {limit - 1}")


def _check_compression(text: TextConfig) -> None:
    expected = text.num_hidden_layers + text.num_nextn_predict_layers
    ratios = text.compress_ratios
    if len(ratios) != expected:
        raise _text_error(
            "compress_ratios",
            f"has {len(ratios)} entries, needs {expected}: num_hidden_layers + num_nextn_predict_layers",
        )
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            raise _text_error(f"compress_ratios[{layer}]", f"{ratio} is not 0, 1 or 2")
        if ratio and layer >= text.num_hidden_layers:
            raise _text_error(f"compress_ratios[{layer}]", f"{ratio} on a draft block, which has window attention only")
    lists = ("kv_source_layer_ids", "index_source_layer_ids")
    for key in lists:
        _check_layer_list(key, getattr(text, key), text.num_hidden_layers)
        for layer in getattr(text, key):
            if not ratios[layer]:
                raise _text_error(key, f"layer {layer} has compress ratio 0, so it owns no compressed rows")
    if text.index_k_source_layer_ids not in (None, text.kv_source_layer_ids):
        raise _text_error("index_k_source_layer_ids", "must equal kv_source_layer_ids: keys are made from that latent")
    for layer in range(text.num_hidden_layers):
        if ratios[layer]:
            _check_reader(text, layer)


def _check_reader(text: TextConfig, layer: int) -> None:
    """A layer with compressed rows needs a KV source of its own ratio and a selection over that source's rows."""
    source = nearest_source(layer, text.kv_source_layer_ids)
    index_source = nearest_source(layer, text.index_source_layer_ids)
    if source is None:
        raise _text_error(
            "kv_source_layer_ids", f"layer {layer} has ratio {text.compress_ratios[layer]} and no source before it"
        )
    if text.compress_ratios[source] != text.compress_ratios[layer]:
        raise _text_error(
            "kv_source_layer_ids",
            f"layer {layer} has ratio {text.compress_ratios[layer]}, source {source} {text.compress_ratios[source]}",
        )
    if index_source is None or index_source < source:
        raise _text_error(
            "index_source_layer_ids", f"layer {layer} reads rows of layer {source} that no index source selects"
        )


def _check_pool(text: TextConfig) -> None:
    pool = text.candidate_source_layer_id
    if pool is None:
        return
    key = "candidate_source_layer_id"
    if pool not in text.index_source_layer_ids:
        raise _text_error(key, f"layer {pool} is not in index_source_layer_ids {list(text.index_source_layer_ids)}")
    if text.compress_ratios[pool] != 1:
        raise _text_error(key, f"layer {pool} has ratio {text.compress_ratios[pool]}: the pool is over rows of ratio 1")
    for layer in text.index_source_layer_ids:
        if layer > pool and nearest_source(layer, text.kv_source_layer_ids) != nearest_source(
            pool, text.kv_source_layer_ids
        ):
            raise _text_error(key, f"index source {layer} reads other rows than the pool of layer {pool} names")


def _check_engram(text: TextConfig) -> None:
    if not text.engram_layer_ids:
        return
    _check_layer_list("engram_layer_ids", text.engram_layer_ids, text.num_hidden_layers)
    _check_limits(text, "text_config", _ENGRAM_LIMITS)
    if len(text.engram_layer_ids) > 64:
        raise _text_error("engram_layer_ids", f"has {len(text.engram_layer_ids)} entries, at most 64")
    if text.engram_max_ngram_size < 2:
        raise _text_error(
            "engram_max_ngram_size", f"{text.engram_max_ngram_size} is below 2: the shortest hashed n-gram"
        )
    if text.engram_head_dim % QUANT_GROUP:
        raise _text_error("engram_head_dim", f"{text.engram_head_dim} is not a multiple of 32, the quantisation group")
    if text.engram_compressed_vocab_size > text.vocab_size:
        raise _text_error(
            "engram_compressed_vocab_size", f"{text.engram_compressed_vocab_size} exceeds vocab_size {text.vocab_size}"
        )
    rows = tuple(table.rows for table in text.engram_tables)
    if text.engram_num_embeddings not in (None, rows):
        raise _text_error(
            "engram_num_embeddings",
            f"{list(text.engram_num_embeddings)} is not {list(rows)}, which follows from the other keys",
        )


def _check_draft(text: TextConfig) -> None:
    if not text.num_nextn_predict_layers:
        return
    _check_limits(text, "text_config", _DRAFT_LIMITS)
    _check_layer_list("dspark_target_layer_ids", text.dspark_target_layer_ids, text.num_hidden_layers)
    if not text.dspark_target_layer_ids:
        raise _text_error("dspark_target_layer_ids", "is empty: the draft needs at least one target layer's state")
    if text.dspark_num_experts_per_tok > text.dspark_n_routed_experts:
        raise _text_error(
            "dspark_num_experts_per_tok",
            f"{text.dspark_num_experts_per_tok} exceeds dspark_n_routed_experts {text.dspark_n_routed_experts}",
        )


def _check_token_ids(config: ModelConfig) -> None:
    text = config.text
    named = [("bos_token_id", config.bos_token_id), ("pad_token_id", config.pad_token_id)]
    named += [("eos_token_id", one) for one in config.eos_token_ids]
    named += [("image_token_id", config.image_token_id)]
    if text.engram_layer_ids:
        named.append(("text_config.engram_pad_token_id", text.engram_pad_token_id))
    if text.num_nextn_predict_layers:
        named.append(("text_config.dspark_noise_token_id", text.dspark_noise_token_id))
    if not config.eos_token_ids:
        raise ConfigError("eos_token_id", "is empty: give at least one id")
    for path, token in named:
        if token is not None and not 0 <= token < text.vocab_size:
            raise ConfigError(path, f"{token} is not a token: ids are 0 to {text.vocab_size - 1}")


def _check_vision(vision: VisionConfig) -> None:
    _check_limits(vision, "vision_config", _VISION_LIMITS)
    if vision.hidden_size % vision.num_attention_heads:
        raise ConfigError(
            "vision_config.num_attention_heads",
            f"{vision.num_attention_heads} does not divide hidden_size {vision.hidden_size}",
        )
