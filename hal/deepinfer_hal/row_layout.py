"""Where row r of a block lies, for each row format: the one place that knows the layout of a cache.

A cache is a uint8 view [B, >= block_bytes]; its first stride may be larger than a block. Row slot s is row s %
block_rows of block s // block_rows. A window store is a cache whose blocks hold one row: [N, row_bytes], block_rows 0
(or 1).

- `fp8_32`, `fp4_16`, `f32`, `bf16` are token-interleaved: row r starts at r * row_bytes, its codes first, then its scales.
- `mxfp4_32` is block-sectioned: the codes of all rows of the block, then the scales of all rows.

`f32` and `bf16` rows are little-endian floats and have no scales: what load_kv decodes into a dense tensor is a store of them.
"""

from __future__ import annotations

import torch

from deepinfer_hal import formats
from deepinfer_hal.errors import BadCall

ROW_FORMATS = ("fp8_32", "fp4_16", "mxfp4_32", "f32", "bf16")
DENSE = {"f32": torch.float32, "bf16": torch.bfloat16}
"""Row formats that hold a row's values as they are, and the type of these."""
SECTIONED = ("mxfp4_32",)


def code_bytes(format: str, width: int) -> int:
    """Bytes of one row's codes. BadCall for an unknown format or a width it cannot hold."""
    if format not in ROW_FORMATS:
        raise BadCall(f"unknown row format {format!r}; known: {', '.join(ROW_FORMATS)}")
    group = formats.GROUP_SIZE.get(format, 1)
    if width <= 0 or width % group:
        raise BadCall(f"row format {format} needs a width that is a positive multiple of {group}, got {width}")
    return {"f32": 4 * width, "bf16": 2 * width, "fp8_32": width}.get(format, width // 2)


def scale_bytes(format: str, width: int) -> int:
    """Bytes of one row's scales; 0 for a dense format."""
    return 0 if format in DENSE else width // formats.GROUP_SIZE[format]


def block_bytes(format: str, width: int, rows: int) -> int:
    """Bytes of a block of `rows` rows of `width` values, without any padding after it."""
    return max(rows, 1) * (code_bytes(format, width) + scale_bytes(format, width))


def check_cache(op: str, name: str, cache: torch.Tensor, format: str, width: int, block_rows: int) -> None:
    """BadCall if `cache` cannot be a store of such rows."""
    needed = block_bytes(format, width, block_rows)
    if cache.dtype != torch.uint8 or cache.dim() != 2 or cache.shape[1] < needed:
        raise BadCall(
            f"{op}: {name} must be uint8 [blocks, >= {needed}] for {max(block_rows, 1)} {format} rows of {width} "
            f"values a block, got {str(cache.dtype).removeprefix('torch.')} {list(cache.shape)}"
        )


def sections(cache: torch.Tensor, format: str, width: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (codes [B, block_rows, code_bytes], scales [B, block_rows, scale_bytes]) of a cache; no copy."""
    rows, codes, scales = max(block_rows, 1), code_bytes(format, width), scale_bytes(format, width)
    if format in SECTIONED:
        return (
            cache[:, : rows * codes].unflatten(1, (rows, codes)),
            cache[:, rows * codes : rows * (codes + scales)].unflatten(1, (rows, scales)),
        )
    packed = cache[:, : rows * (codes + scales)].unflatten(1, (rows, codes + scales))
    return packed[..., :codes], packed[..., codes:]


def read_codes(
    cache: torch.Tensor, slots: torch.Tensor, format: str, width: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies (codes [n, code_bytes], scales [n, scale_bytes]) of the rows at `slots` [n], which must all be valid."""
    slots, rows = slots.long(), max(block_rows, 1)
    block, row = slots // rows, slots % rows
    codes, scales = sections(cache, format, width, block_rows)
    return codes[block, row], scales[block, row]


def read_rows(cache: torch.Tensor, slots: torch.Tensor, format: str, width: int, block_rows: int) -> torch.Tensor:
    """float32 [n, width]: the rows at `slots` [n] (any integer type), decoded. A negative slot gives zeros.

    Only the named rows are read, so what unused rows hold never shows.
    """
    valid = slots >= 0
    if not bool(valid.all()):
        rows = torch.zeros(slots.shape[0], width, dtype=torch.float32, device=cache.device)
        rows[valid] = read_rows(cache, slots[valid], format, width, block_rows)
        return rows
    codes, scales = read_codes(cache, slots, format, width, block_rows)
    return decode_rows(codes, scales, format)


def decode_rows(codes: torch.Tensor, scales: torch.Tensor, format: str) -> torch.Tensor:
    """float32 [n, width] from one row's codes and scales each."""
    if format in DENSE:
        return codes.contiguous().view(DENSE[format]).float()
    if codes.shape[0] == 0:
        width = codes.shape[1] if format == "fp8_32" else 2 * codes.shape[1]
        return torch.zeros(0, width, dtype=torch.float32, device=codes.device)
    return formats.dequantise(codes, scales, format)


def encode_rows(values: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) as uint8 of the rows of `values` [n, width]."""
    n, width = values.shape
    if n == 0 or format in DENSE:
        codes = torch.zeros(n, code_bytes(format, width), dtype=torch.uint8, device=values.device)
        if n:
            codes = values.to(DENSE[format]).contiguous().view(torch.uint8)
        return codes, torch.zeros(n, scale_bytes(format, width), dtype=torch.uint8, device=values.device)
    return formats.quantise(values, format)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, format: str, block_rows: int) -> None:
    """Quantises `values` [n, width] (any float dtype) into the rows at `slots` [n]; a negative slot stores nothing.

    Slots are distinct; bytes of other rows, and padding between blocks, stay as they are.
    """
    valid = slots >= 0
    slots, values = slots[valid].long(), values[valid]
    codes, scales = encode_rows(values, format)
    rows = max(block_rows, 1)
    block, row = slots // rows, slots % rows
    code_view, scale_view = sections(cache, format, values.shape[1], block_rows)
    code_view[block, row] = codes
    if format not in DENSE:
        scale_view[block, row] = scales
