"""Weights of the Ascend backend. FP8 and FP4 matrices lie as the cube reads them, everything else as the checkpoint does.

Tiles (DI_LAYOUT_CUBE_FP8, _FP4) of a matrix [N, K]: N is filled up to 16 and K to 64 with zeros, then

- values [K / 32, N / 16, 16, 32] bytes of e4m3, the Nz form of L1: any 16 columns of a result and 32 of K are 512 bytes
  in a row, and neighbouring columns follow;
- FP4 has half of that, [K / 32, N / 16, 256]: byte i holds the codes of items i and i + 256 of the 512, see `pack_pairs`;
- scales [N / 16, K / 64, 16, 2] bytes of e8m0, the form that MmadMx takes, one for each row and 32 of K (the rows of a
  32 x 32 block repeat theirs: 1/32 of the values). Those of FP4 count for e4m3 codes that hold value * 2^-6: 6 more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from deepinfer_hal import formats
from deepinfer_hal.c_abi import pack_tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, canonical_nbytes

from deepinfer_ascend import twin

TABLE_ROLES = frozenset({"embed", "embedding", "engram_table", "markov_embed"})
"""Roles whose rows are gathered by index; they keep the checkpoint's layout."""

_STRIDED, _CUBE = 0, {"fp8_block32": 2, "fp4_row32": 3}  # di_layout
_ROWS, _LINE, _PAIR = 16, 32, 64  # a fractal's rows, its bytes of K, and what two scales cover
_FP4_SHIFT, _LARGEST_FP4_SCALE = 6, 254 - 6
_NO_SCALE = 127  # 2^0, where there are no values
_AT_ONCE_BYTES = 64 << 20  # of a stack that are converted together


def _plain(t: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """float8 and int8 storage as bytes, contiguous, on a device."""
    if t is None:
        return None
    return (t.view(torch.uint8) if t.element_size() == 1 else t).to(device).contiguous()


def _up(x: int, to: int) -> int:
    return -(-x // to) * to


def _filled(t: torch.Tensor, rows: int, columns: int, value: int) -> torch.Tensor:
    """t [..., n, k] filled up to [..., rows, columns]."""
    return torch.nn.functional.pad(t, (0, columns - t.shape[-1], 0, rows - t.shape[-2]), value=value)


def to_fractals(values: torch.Tensor) -> torch.Tensor:
    """uint8 [E, N, K] -> [E, ceil(K, 64) / 32, ceil(N, 16) / 16, 16, 32], zeros where there was nothing."""
    full = _filled(values, _up(values.shape[1], _ROWS), _up(values.shape[2], _PAIR), 0)
    return full.unflatten(2, (-1, _LINE)).unflatten(1, (-1, _ROWS)).permute(0, 3, 1, 2, 4).contiguous()


def from_fractals(tiles: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse: uint8 [E, n, k]."""
    return tiles.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)[:, :n, :k].contiguous()


def to_scale_lines(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [E, N, ceil(K / 32)] -> [E, ceil(N, 16) / 16, ceil(K, 64) / 64, 16, 2], 1.0 where there was nothing."""
    full = _filled(scales, _up(scales.shape[1], _ROWS), _up(scales.shape[2], 2), _NO_SCALE)
    return full.unflatten(2, (-1, 2)).unflatten(1, (-1, _ROWS)).permute(0, 1, 3, 2, 4).contiguous()


def from_scale_lines(lines: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """The inverse: uint8 [E, n, groups]."""
    return lines.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)[:, :n, :groups].contiguous()


def pack_pairs(nibbles: torch.Tensor) -> torch.Tensor:
    """e2m1 codes in fractals [..., 16, 32] -> bytes [..., 256].

    A code s|m (sign, three bits of magnitude) is the e4m3 code s0 0mmm 00, bits 7 and 4 to 2. The first of a pair lies
    there already; of the second's four bits, 7 lies at 5, 4 at 6, and 3 and 2 at 1 and 0. So one And gives the first,
    and two masked shifts by two the second.
    """
    first, second = nibbles.flatten(-2).unflatten(-1, (2, 256)).unbind(-2)
    placed = (second & 8) << 2 | (second & 4) << 4 | (second & 3)
    return (first & 8) << 4 | (first & 7) << 2 | placed


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """The inverse: e2m1 codes [..., 16, 32]."""
    first = (packed >> 4 & 8) | (packed >> 2 & 7)
    second = (packed >> 2 & 8) | (packed >> 4 & 4) | (packed & 3)
    return torch.stack((first, second), dim=-2).flatten(-2).unflatten(-1, (_ROWS, _LINE))


def _tiles_of(format: str, values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [E, N, K] of a checkpoint format as the cube's values and scales."""
    if format == "fp4_row32":
        shifted = torch.where(scales == 255, scales, scales + _FP4_SHIFT)
        return pack_pairs(to_fractals(formats.unpack_nibbles(values))), to_scale_lines(shifted)
    rows = scales.repeat_interleave(formats.WEIGHT_BLOCK, 1)[:, : values.shape[1]]
    return to_fractals(values), to_scale_lines(rows)


def _matrices_of(format: str, n: int, k: int, tiles: torch.Tensor, lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `_tiles_of`."""
    if format == "fp4_row32":
        scales = from_scale_lines(lines, n, k // _LINE)
        values = formats.pack_nibbles(from_fractals(unpack_pairs(tiles), n, k))
        return values, torch.where(scales == 255, scales, scales - _FP4_SHIFT)
    return from_fractals(tiles, n, k), from_scale_lines(lines, n, -(-k // _LINE))[:, :: formats.WEIGHT_BLOCK].contiguous()


def _converted(stacked: bool, convert: Callable, *parts: torch.Tensor) -> list[torch.Tensor]:
    """`convert` of stacks, or of a matrix as a stack of one, on the host; large stacks a few matrices at a time."""
    if not stacked:
        return [t[0] for t in convert(*(p[None].cpu() for p in parts))]
    some = max(1, _AT_ONCE_BYTES // max(1, parts[0][0].numel()))
    found = [convert(*(p[i : i + some].cpu() for p in parts)) for i in range(0, len(parts[0]), some)]
    return list(found[0]) if len(found) == 1 else [torch.cat(t) for t in zip(*found, strict=True)]


def _for_the_cube(role: str, format: str) -> bool:
    return format in _CUBE and role not in TABLE_ROLES


def prepared_nbytes(role: str, shape: tuple[int, ...], format: str) -> int:
    """Bytes of a weight of logical `shape` as this backend keeps it."""
    if not _for_the_cube(role, format):
        return canonical_nbytes(format, shape)
    *lead, n, k = shape
    items = math.prod(lead) * _up(n, _ROWS) * _up(k, _PAIR)
    return items // (2 if format == "fp4_row32" else 1) + items // _LINE


def prepare(role: str, canonical: CanonicalWeight, device: torch.device | str = "cpu") -> WeightHandle:
    """A handle on `device` in the cube's layout, or in the checkpoint's for tables, dense weights and FP4 with a scale of
    2^122 or more, whose shifted scale no e8m0 byte holds (the kernels refuse to multiply with that one)."""
    where = torch.device(device)
    if canonical.values.numel() == 0 or not _for_the_cube(role, canonical.format) or _has_huge_scale(canonical):
        kept = (_plain(canonical.values, where), _plain(canonical.scales, where))
        return PlainWeight(role, CanonicalWeight(canonical.format, *kept))
    values, scales = (_plain(t, t.device) for t in (canonical.values, canonical.scales))
    tiles, lines = _converted(values.dim() == 3, lambda v, s: _tiles_of(canonical.format, v, s), values, scales)
    return CubeWeight(role, canonical.format, canonical.shape, tiles.to(where), lines.to(where))


def _has_huge_scale(canonical: CanonicalWeight) -> bool:
    if canonical.format != "fp4_row32":
        return False
    scales = _plain(canonical.scales, torch.device("cpu"))
    return bool(((scales > _LARGEST_FP4_SCALE) & (scales < 255)).any())


class PlainWeight(WeightHandle):
    """The canonical bytes, on the device that they were given on. Packed FP4 keeps two values a byte: the stored row
    stride is then half of the logical K."""

    @functools.cached_property
    def native(self) -> Any:
        """What kernels on the twin read."""
        stored = self.canonical()
        return twin.module().packed_ref(stored.values, stored.scales, _STRIDED, list(self.shape))

    def packed(self) -> tuple[bytes, bytes]:
        """What kernels behind the C ABI read."""
        stored = self.canonical()
        return pack_tensor(stored.values, shape=self.shape), pack_tensor(stored.scales)

    def slot(self, index: int) -> WeightHandle:
        return PlainWeight(self.role, super().slot(index).canonical())


class CubeWeight(WeightHandle):
    """A quantised weight in tiles: `tiles` and `lines` as the module describes, one leading dimension more for stacks."""

    def __init__(self, role: str, format: str, shape: tuple[int, ...], tiles: torch.Tensor, lines: torch.Tensor) -> None:
        self.role, self.format, self.shape = role, format, tuple(shape)
        self.tiles, self.lines = tiles, lines

    @functools.cached_property
    def native(self) -> Any:
        """What kernels on the twin read."""
        return twin.module().packed_ref(self.tiles, self.lines, _CUBE[self.format], list(self.shape))

    def packed(self) -> tuple[bytes, bytes]:
        """What kernels behind the C ABI read."""
        return pack_tensor(self.tiles, shape=self.shape, layout=_CUBE[self.format]), pack_tensor(self.lines)

    @property
    def nbytes(self) -> int:
        return self.tiles.numel() + self.lines.numel()

    def canonical(self) -> CanonicalWeight:
        n, k = self.shape[-2:]
        stacked = len(self.shape) == 3
        found = _converted(stacked, lambda t, s: _matrices_of(self.format, n, k, t, s), self.tiles, self.lines)
        return CanonicalWeight(self.format, *(t.to(self.tiles.device) for t in found))

    def slot(self, index: int) -> WeightHandle:
        if len(self.shape) != 3:
            raise BadCall(f"weight {self.role} has shape {list(self.shape)}: only stacked weights have slots")
        if not 0 <= index < self.shape[0]:
            raise BadCall(f"weight {self.role} has {self.shape[0]} slots, asked for {index}")
        return CubeWeight(self.role, self.format, self.shape[1:], self.tiles[index], self.lines[index])
