"""Which precision each stream, activation and cache row has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.errors import ConfigError

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Numerics:
    """Precision of a loaded model.

    stream_dtype: residual streams and dense activations; quantise_activations: inputs of FP8 and FP4 products are e4m3 with
    one ue8m0 scale per 32; window / main / index: row formats of the three caches.
    """

    stream_dtype: torch.dtype = torch.bfloat16
    quantise_activations: bool = True
    window_format: str = "fp8_32"
    main_format: str = "fp4_16"
    index_format: str = "mxfp4_32"

    @property
    def dtype_name(self) -> str:
        return "bf16" if self.stream_dtype == torch.bfloat16 else "f32"

    @property
    def quantise_index_query(self) -> bool:
        """The index query is rounded like the index keys, or not at all."""
        return self.index_format == "mxfp4_32"


def choose_numerics(dtype: str, act_quant: str, kv_cache_dtype: str, fp4_sparse_kv: bool = True) -> Numerics:
    """Numerics of the settings of EngineConfig; ConfigError names the field that is wrong.

    fp4_sparse_kv: the checkpoint's use_fp4_sparse_kv; without it the main compressed rows are fp8_32.
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"{dtype!r} is not one of {', '.join(DTYPES)}")
    if act_quant not in ("fp8_32", "none"):
        raise ConfigError("act_quant", f"{act_quant!r} is not 'fp8_32' or 'none'")
    if kv_cache_dtype not in ("auto", "float32"):
        raise ConfigError("kv_cache_dtype", f"{kv_cache_dtype!r} is not 'auto' or 'float32'")
    formats = ("f32", "f32", "f32")
    if kv_cache_dtype == "auto":
        formats = ("fp8_32", "fp4_16" if fp4_sparse_kv else "fp8_32", "mxfp4_32")
    return Numerics(DTYPES[dtype], act_quant == "fp8_32", *formats)
