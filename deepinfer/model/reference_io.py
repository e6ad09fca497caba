"""What the reference network needs from a checkpoint folder: its configuration and its weights as float32 tensors."""

import dataclasses
import json
from pathlib import Path

import torch
from deepinfer_hal.errors import BadCall
from deepinfer_hal.formats import dequantise, dequantise_weight_fp4, dequantise_weight_fp8

YARN_OFF = {"factor": 1.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 1}


@dataclasses.dataclass(frozen=True)
class ReferenceConfig:
    """The text model's configuration, under the names of config.json. Defaults are the released model's constants."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    rope_scaling: dict
    index_k_source_layer_ids: tuple[int, ...] = ()
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 8
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rms_norm_eps: float = 1e-20
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 0
    engram_compressed_vocab_size: int = 0
    engram_pad_token_id: int = 2
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    use_fp4_sparse_kv: bool = True
    image_token_id: int | None = None

    @classmethod
    def from_dict(cls, config_json: dict) -> "ReferenceConfig":
        """From config.json's content (nested under `text_config`, or flat). Keys that nothing reads are ignored."""
        text = {**config_json, **config_json.get("text_config", {})}
        names = {field.name: field for field in dataclasses.fields(cls)}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in text.items() if k in names and v is not None}
        values.setdefault("rope_scaling", YARN_OFF)
        missing = [n for n, f in names.items() if n not in values and f.default is dataclasses.MISSING]
        if missing:
            raise BadCall(f"config.json lacks {', '.join(missing)}; the reference network needs them")
        values.setdefault("index_k_source_layer_ids", values["kv_source_layer_ids"])
        config = cls(**values)
        layers = config.num_hidden_layers + config.num_nextn_predict_layers
        if len(config.compress_ratios) != layers:
            raise BadCall(f"compress_ratios has {len(config.compress_ratios)} entries, the model has {layers} layers")
        return config

    def ratio(self, layer: int) -> int:
        """Compression ratio of a backbone layer: 0 (window only), 1 or 2."""
        return self.compress_ratios[layer]


def load_checkpoint(folder) -> tuple[ReferenceConfig, dict[str, torch.Tensor]]:
    """Configuration and all weights of a checkpoint folder.

    Names are as on disk without an optional `model.` prefix; a quantised `X.weight` is dequantised to float32 and its
    `X.scale` consumed; everything else is widened to float32. Small models only: all of it is held in memory.
    """
    from safetensors import safe_open

    folder = Path(folder)
    config = ReferenceConfig.from_dict(json.loads((folder / "config.json").read_text()))
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise BadCall(f"{folder}: no model*.safetensors file")
    stored = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a shard is not a dict
                stored[name.removeprefix("model.")] = shard.get_tensor(name)
    return config, dequantise_all(stored)


def dequantise_all(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float32 weights from stored tensors: `X.scale` tells that `X.weight` is quantised, its dtype tells how."""
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(".scale") and name.removesuffix(".scale") + ".weight" in stored:
            continue
        scale = stored.get(name.removesuffix(".weight") + ".scale") if name.endswith(".weight") else None
        weights[name] = tensor.float() if scale is None else _dequantise(name, tensor, scale.view(torch.uint8))
    return weights


def _dequantise(name: str, tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = tensor.view(torch.uint8)
    if tensor.dtype == torch.int8:
        return dequantise_weight_fp4(codes, scale)
    if name.endswith("engram.embed.weight"):  # table rows carry one scale per row and 32 columns, not per 32 x 32 block
        return dequantise(codes, scale, "fp8_32")
    return dequantise_weight_fp8(codes, scale)
