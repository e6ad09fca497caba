"""`ModelConfig`: config.json of a DeepSeek-V4.1 checkpoint, read strictly.

An unknown key, a wrong type or a missing value is a ConfigError that names the key's path. Keys that Hugging Face tools
write and that change nothing here are listed in `HARMLESS_KEYS` and dropped. Impossible combinations are refused by
`deepinfer.model_checks`; which layer reads what follows in `deepinfer.topology`.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from deepinfer.engram_layout import EngramLayer, engram_layers
from deepinfer.errors import ConfigError
from deepinfer.strict_json import parse_object
from deepinfer.topology import LayerTopology, layer_topologies

_COMMON = {"_name_or_path", "transformers_version", "use_cache", "initializer_range", "torch_dtype", "dtype"}
HARMLESS_KEYS: dict[str, frozenset[str]] = {
    "": frozenset(_COMMON - {"dtype"} | {"auto_map", "tie_word_embeddings", "_commit_hash"}),
    "text_config": frozenset(
        _COMMON | {"bos_token_id", "eos_token_id", "pad_token_id", "architectures", "sentence_level_mask"}
    ),
    "vision_config": frozenset(_COMMON),
    "quantization_config": frozenset({"modules_to_not_convert"}),
    "text_config.rope_scaling": frozenset({"type"}),
}


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts: no unknown key, no silent conversion, no change after reading."""


class RopeScaling(_Strict, kw_only=True):
    """YaRN parameters of the layers with compressed keys. There is no magnitude scale."""

    rope_type: Literal["yarn"]
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


class QuantizationConfig(_Strict, kw_only=True):
    """The released storage formats; every value is fixed."""

    quant_method: Literal["fp8"]
    activation_scheme: Literal["dynamic"]
    scale_fmt: Literal["ue8m0"]
    expert_dtype: Literal["fp4"]
    weight_block_size: tuple[int, int]
    fmt: Literal["e4m3"] = "e4m3"


class VisionConfig(_Strict, kw_only=True):
    """The vision tower. Its weights are recognised; images are not served."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None
    model_type: Literal["deepseek_v41_vision"] = "deepseek_v41_vision"


class TextConfig(_Strict, kw_only=True, dict=True):
    """The text model. Names and meanings are those of the released config.json; values with a default may be absent."""

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
    max_position_embeddings: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    rope_theta: float
    model_type: Literal["deepseek_v41_text"] = "deepseek_v41_text"

    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    rope_scaling: RopeScaling
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_k_source_layer_ids: tuple[int, ...] | None = None
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    use_fp4_sparse_kv: bool = True

    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    gate_temp: float = 1.0
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    hc_shifted: bool = True

    engram_layer_ids: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16_000_000
    engram_num_embeddings: tuple[int, ...] | None = None
    engram_compressed_vocab_size: int = 0
    engram_pad_token_id: int = 2

    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_target_attn_input: bool = True
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0

    @cached_property
    def layers(self) -> tuple[LayerTopology, ...]:
        """What each backbone layer owns and reads, in order."""
        return self._topologies[: self.num_hidden_layers]

    @cached_property
    def draft_layers(self) -> tuple[LayerTopology, ...]:
        """The same for the draft blocks; `layer` counts on from the backbone's."""
        return self._topologies[self.num_hidden_layers :]

    @cached_property
    def _topologies(self) -> tuple[LayerTopology, ...]:
        return layer_topologies(self)

    @cached_property
    def engram_tables(self) -> tuple[EngramLayer, ...]:
        """Primes, offsets and rows of every Engram layer."""
        return engram_layers(
            self.engram_layer_ids, self.engram_max_ngram_size, self.engram_n_heads, self.engram_vocab_size
        )

    @property
    def engram_width(self) -> int:
        """Columns of one token's concatenated Engram rows."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads * self.engram_head_dim

    @property
    def main_kv_format(self) -> str:
        """Canonical row format of the compressed keys."""
        return "fp4_16" if self.use_fp4_sparse_kv else "fp8_32"

    @property
    def prefill_layers(self) -> int:
        """Layers before the first of ratio 1: the part that a bounded replay runs on every token."""
        return next((t.layer for t in self.layers if t.ratio == 1), self.num_hidden_layers)


class ModelConfig(_Strict, kw_only=True):
    """A whole config.json. `text` and `vision` are its text_config and vision_config."""

    text: TextConfig = msgspec.field(name="text_config")
    quantization: QuantizationConfig = msgspec.field(name="quantization_config")
    vision: VisionConfig | None = msgspec.field(name="vision_config", default=None)
    architectures: tuple[str, ...]
    model_type: Literal["deepseek_v41"]
    dtype: Literal["bfloat16"] = "bfloat16"
    bos_token_id: int
    eos_token_id: int | tuple[int, ...]
    pad_token_id: int | None = None
    image_token_id: int | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> ModelConfig:
        """Check and convert the parsed content of a config.json. Raises ConfigError."""
        from deepinfer.model_checks import check_model_config

        cleaned = _drop_harmless(content, "")
        try:
            config = msgspec.convert(cleaned, cls, strict=True)
        except msgspec.ValidationError as error:
            raise config_error(error, cls) from None
        check_model_config(config)
        return config

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `folder`/config.json. Raises ConfigError, also where the file is absent or no JSON object."""
        path = Path(folder) / "config.json"
        try:
            content = parse_object(path.read_bytes())
        except OSError as error:
            raise ConfigError("", f"cannot read {path}: {error.strerror}; give the folder of a checkpoint") from None
        except ValueError as error:
            raise ConfigError("", f"{path} is not valid JSON: {error}") from None
        return cls.from_dict(content)


def config_error(error: msgspec.ValidationError, root: type) -> ConfigError:
    """Turn msgspec's `Expected ... - at `$.a.b`` into a ConfigError with the path a.b below the struct `root`."""
    message, _, where = str(error).partition(" - at ")
    path = where.strip("`").removeprefix("$").lstrip(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message)
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    if unknown or missing:
        path = ".".join(part for part in (path, (unknown or missing).group(1)) if part)
        message = "unknown key: remove it, or correct its spelling" if unknown else "missing, but required"
    elif message.startswith("Invalid enum value"):
        message = f"{message.removeprefix('Invalid enum value ')} is not {_allowed_values(root, path)}"
    return ConfigError(path, message)


def _allowed_values(root: type, path: str) -> str:
    """The values a Literal field at `path` may have, for an error message."""
    found: Any = root
    for part in path.split("."):
        candidates = [
            one for one in (found, *get_args(found)) if isinstance(one, type) and issubclass(one, msgspec.Struct)
        ]
        names = dict(zip(candidates[0].__struct_encode_fields__, candidates[0].__struct_fields__, strict=True))
        found = get_type_hints(candidates[0])[names[part]]
    return " or ".join(repr(value) for value in get_args(found))


def _drop_harmless(content: Any, path: str) -> Any:
    """Without the harmless keys at this path; non-objects are left for the type check to refuse."""
    if not isinstance(content, dict):
        return content
    kept = {}
    for key, value in content.items():
        below = f"{path}.{key}" if path else key
        if key not in HARMLESS_KEYS.get(path, ()):
            kept[key] = _drop_harmless(value, below) if below in HARMLESS_KEYS else value
    if path == "text_config.rope_scaling" and "rope_type" not in kept and "type" in content:
        kept["rope_type"] = content["type"]
    return kept
