"""A second opinion on stored rows: read one at a time with numpy and ml_dtypes, sharing no code with the HAL."""

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def row_section(cache, slot: int, format: str, width: int, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(code bytes, scale bytes) of one row, as copies."""
    rows = max(block_rows, 1)
    block, r = cache.numpy()[slot // rows], slot % rows
    codes = {"fp8_32": width, "fp4_16": width // 2, "mxfp4_32": width // 2, "f32": 4 * width, "bf16": 2 * width}[format]
    scales = {"fp8_32": width // 32, "fp4_16": width // 16, "mxfp4_32": width // 32, "f32": 0, "bf16": 0}[format]
    if format == "mxfp4_32":
        start = rows * codes + r * scales
        return block[r * codes : (r + 1) * codes].copy(), block[start : start + scales].copy()
    start = r * (codes + scales)
    return block[start : start + codes].copy(), block[start + codes : start + codes + scales].copy()


def decode_row(cache, slot: int, format: str, width: int, block_rows: int) -> np.ndarray:
    """float64 [width]."""
    codes, scales = row_section(cache, slot, format, width, block_rows)
    if format == "f32":
        return codes.view("<f4").astype(np.float64)
    if format == "bf16":
        return codes.view(ml_dtypes.bfloat16).astype(np.float64)
    if format == "fp8_32":
        values, group = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 32
    else:
        values, group = np.empty(width), 16 if format == "fp4_16" else 32
        values[0::2], values[1::2] = E2M1[codes & 15], E2M1[codes >> 4]
    if format == "fp4_16":
        factor = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        factor = np.exp2(scales.astype(np.float64) - 127)
    return values * np.repeat(factor, group)


def attend(query: np.ndarray, keys: list[np.ndarray], sink: np.ndarray, scale: float) -> np.ndarray:
    """float64 [h, D]: plain softmax attention with K = V and a sink in the denominator."""
    out = np.zeros(query.shape)
    if not keys:
        return out
    k = np.stack(keys)
    for h in range(query.shape[0]):
        a = k @ query[h] * scale
        top = max(a.max(), sink[h])
        p = np.exp(a - top)
        out[h] = p @ k / (p.sum() + np.exp(sink[h] - top))
    return out
