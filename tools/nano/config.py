"""nano's config.json, and the table of its tensors: name, shape and storage type, hence its exact size on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_CHECKPOINT_BYTES = 16_000_000

TEXT_CONFIG = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 7, "num_nextn_predict_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 64, "sliding_window": 128,
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-20, "hidden_act": "silu", "swiglu_limit": 10.0,
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "initializer_range": 0.02, "use_cache": True,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64,
    "candidate_source_layer_id": 3, "candidate_topk_blocks": 32, "candidate_block_size": 8,
    "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
    "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "engram_layer_ids": [1], "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 32,
    "engram_vocab_size": 4001, "engram_pad_token_id": 2,
    "dspark_block_size": 5, "dspark_noise_token_id": 2047, "dspark_target_layer_ids": [4, 5, 6],
    "dspark_markov_rank": 32, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
}


def config_json(engram_compressed_vocab_size: int, **changes) -> dict:
    """The whole config.json as a dict; `changes` overrides text_config entries (tests shrink the model with it)."""
    text = {**TEXT_CONFIG, **changes, "engram_compressed_vocab_size": engram_compressed_vocab_size}
    text["engram_num_embeddings"] = [engram_rows(text)]
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 2030,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                "scale_fmt": "ue8m0", "weight_block_size": [32, 32], "expert_dtype": "fp4"},
        "text_config": text,
    }


def engram_rows(text: dict) -> int:
    """Rows of the one Engram table: the sum of its primes, each above the last of its n-gram size and unused."""
    used: set[int] = set()
    for _ in range(text["engram_max_ngram_size"] - 1):
        number = text["engram_vocab_size"] - 1
        for _ in range(text["engram_n_heads"]):
            number += 1
            while number in used or any(number % d == 0 for d in range(2, math.isqrt(number) + 1)):
                number += 1
            used.add(number)
    return sum(used)


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint. kind: bf16, f32, fp8 (32 x 32 scales), fp8_rows (per row, per 32) or fp4."""

    shape: tuple[int, ...]
    kind: str

    @property
    def stored_bytes(self) -> int:
        count = math.prod(self.shape)
        if self.kind in ("bf16", "f32"):
            return count * (2 if self.kind == "bf16" else 4)
        rows, columns = self.shape
        if self.kind == "fp8":
            return count + math.ceil(rows / 32) * math.ceil(columns / 32)
        return (count if self.kind == "fp8_rows" else count // 2) + rows * (columns // 32)


def tensor_table(config: dict) -> dict[str, Tensor]:
    """Name -> Tensor of everything in a text-only checkpoint, in the order it is stored. `.scale`s are implied."""
    text = config["text_config"]
    hidden, vocab, streams = text["hidden_size"], text["vocab_size"], text["hc_mult"]
    table = {"embed.weight": Tensor((vocab, hidden), "bf16")}
    for layer in range(text["num_hidden_layers"]):
        table |= _block(text, f"layers.{layer}.", text["n_routed_experts"])
        table |= _sparse_side(text, layer)
        if layer in text["engram_layer_ids"]:
            prefix, slots = f"layers.{layer}.engram.", (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
            width = text["engram_head_dim"]
            table[prefix + "embed.weight"] = Tensor((engram_rows(text), width), "fp8_rows")
            table[prefix + "wkv.weight"] = Tensor(((streams + 1) * hidden, slots * width), "fp8")
            table[prefix + "q_weight"] = table[prefix + "k_weight"] = Tensor((streams, hidden), "bf16")
    table |= {"norm.weight": Tensor((hidden,), "bf16"), "head.weight": Tensor((vocab, hidden), "bf16")}
    blocks = text["num_nextn_predict_layers"]
    for block in range(blocks):
        table |= _block(text, f"mtp.{block}.", text["dspark_n_routed_experts"])
    last, rank = f"mtp.{blocks - 1}.", text["dspark_markov_rank"]
    table |= {
        "mtp.0.main_proj.weight": Tensor((hidden, hidden * len(text["dspark_target_layer_ids"])), "fp8"),
        "mtp.0.main_norm.weight": Tensor((hidden,), "bf16"),
        last + "norm.weight": Tensor((hidden,), "bf16"),
        last + "markov_head.embed.weight": Tensor((vocab, rank), "bf16"),
        last + "markov_head.head.weight": Tensor((vocab, rank), "bf16"),
        last + "confidence_head.proj.weight": Tensor((1, hidden + rank), "bf16"),
    }
    return table


def _block(text: dict, prefix: str, experts: int) -> dict[str, Tensor]:
    hidden, dim, heads = text["hidden_size"], text["head_dim"], text["num_attention_heads"]
    q_rank, groups, o_rank = text["q_lora_rank"], text["o_groups"], text["o_lora_rank"]
    inner, streams = text["moe_intermediate_size"], text["hc_mult"]
    table = {"attn_norm.weight": Tensor((hidden,), "bf16"), "ffn_norm.weight": Tensor((hidden,), "bf16")}
    for site in ("attn", "ffn"):
        table[f"hc_{site}_fn"] = Tensor(((2 + streams) * streams, streams * hidden), "f32")
        table[f"hc_{site}_base"] = Tensor(((2 + streams) * streams,), "f32")
        table[f"hc_{site}_scale"] = Tensor((3,), "f32")
    table |= {
        "attn.wq_a.weight": Tensor((q_rank, hidden), "fp8"), "attn.wq_b.weight": Tensor((heads * dim, q_rank), "fp8"),
        "attn.q_norm.weight": Tensor((q_rank,), "bf16"), "attn.kv_norm.weight": Tensor((dim,), "bf16"),
        "attn.wkv.weight": Tensor((dim, hidden), "fp8"),
        "attn.wo_a.weight": Tensor((groups * o_rank, heads // groups * dim), "fp8"),
        "attn.wo_b.weight": Tensor((hidden, groups * o_rank), "fp8"), "attn.attn_sink": Tensor((heads,), "f32"),
        "ffn.gate.weight": Tensor((experts, hidden), "bf16"),
        "ffn.gate.bias": Tensor((experts,), "f32"), "ffn.gate.bias_vl": Tensor((experts,), "f32"),
    }
    for name, kind in [(f"experts.{e}", "fp4") for e in range(experts)] + [("shared_experts", "fp8")]:
        table[f"ffn.{name}.w1.weight"] = table[f"ffn.{name}.w3.weight"] = Tensor((inner, hidden), kind)
        table[f"ffn.{name}.w2.weight"] = Tensor((hidden, inner), kind)
    return {prefix + name: tensor for name, tensor in table.items()}


def _sparse_side(text: dict, layer: int) -> dict[str, Tensor]:
    """Compressor and indexer tensors of a backbone layer; none where it is no source."""
    hidden, dim, index_dim = text["hidden_size"], text["head_dim"], text["index_head_dim"]
    table = {}
    if layer in text["kv_source_layer_ids"]:
        table["compressor.wkv.weight"] = Tensor((dim, hidden), "bf16")
        if text["compress_ratios"][layer] == 2:
            table["compressor.wgate.weight"] = Tensor((dim, hidden), "bf16")
        table["compressor.norm.weight"] = Tensor((dim,), "bf16")
        table["indexer.wk.weight"] = Tensor((index_dim, dim), "bf16")
        table["indexer.k_norm.weight"] = Tensor((index_dim,), "bf16")
    if layer in text["index_source_layer_ids"]:
        table["indexer.wq_b.weight"] = Tensor((text["index_n_heads"] * index_dim, text["q_lora_rank"]), "fp8")
        table["indexer.weights_proj.weight"] = Tensor((text["index_n_heads"], hidden), "bf16")
    return {f"layers.{layer}.attn.{name}": tensor for name, tensor in table.items()}


def stored_bytes(config: dict) -> int:
    """Bytes of all tensors, scales included, without shard headers."""
    return sum(tensor.stored_bytes for tensor in tensor_table(config).values())
