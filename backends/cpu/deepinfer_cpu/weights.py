"""Weights of the CPU backend: float32 panels [..., ceil(N / 16), K, 16], so that a kernel reads sixteen outputs at once.

Expanding a checkpoint format to float32 is exact, and so is the way back: value / 2^(scale - 127) is a code again. Only
the scales are kept beside the panels. Tables whose rows are gathered keep the checkpoint's own bytes.
"""

from __future__ import annotations

import math

import torch
from deepinfer_hal import formats
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, canonical_nbytes

from deepinfer_cpu.kernels import native

PANEL = 16
TABLE_ROLES = frozenset({"embed", "embedding", "engram_table", "markov_embed"})
"""Roles whose rows are gathered by index rather than multiplied with."""

_STRIDED, _PANELS = 0, 1  # di_layout
_LARGEST_INVERTIBLE_SCALE = 246  # above it, 448 * 2^(scale - 127) is no float32 any more


def _is_table(role: str, format: str) -> bool:
    return role in TABLE_ROLES or format == "fp8_row32"


class TableWeight(WeightHandle):
    """The checkpoint's own bytes, readable by the gathering kernels."""

    def __init__(self, role: str, canonical: CanonicalWeight) -> None:
        kept = (canonical.values, canonical.scales)
        values, scales = (None if t is None else t.contiguous() for t in kept)
        super().__init__(role, CanonicalWeight(canonical.format, values, scales))
        self.packed = (values, scales)
        module = native()
        self.native = None if module is None else module.packed_ref(_plain(values), _plain(scales), _STRIDED, list(self.shape))


class PanelWeight(WeightHandle):
    """A matrix, or a stack of them, in float32 panels. `packed` holds (panels, scales or None)."""

    def __init__(
        self,
        role: str,
        format: str,
        shape: tuple[int, ...],
        panels: torch.Tensor,
        scales: torch.Tensor | None,
        kept: CanonicalWeight | None = None,
    ) -> None:
        self.role, self.format, self.shape = role, format, shape
        self.packed = (panels, scales)
        self._kept = kept
        self.native = native().packed_ref(panels, scales, _PANELS, list(shape))

    @property
    def nbytes(self) -> int:
        held = [*self.packed] if self._kept is None else [*self.packed, self._kept.values]
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def dequantise(self) -> torch.Tensor:
        panels = self.packed[0]
        *lead, n, k = self.shape
        return panels.transpose(-1, -2).reshape(*lead, panels.shape[-3] * PANEL, k)[..., :n, :]

    def canonical(self) -> CanonicalWeight:
        if self._kept is not None:
            return self._kept
        values = self.dequantise()
        if self.format == "f32":
            return CanonicalWeight("f32", values.contiguous())
        if self.format == "bf16":
            return CanonicalWeight("bf16", (values.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16))
        scales = self.packed[1]
        spread = formats.E8M0_VALUES()[254 - scales.long().clamp_max(253)]  # 2^(127 - scale)
        if self.format == "fp4_row32":
            codes = formats.encode_e2m1(values * spread.repeat_interleave(32, -1))
            return CanonicalWeight(self.format, formats.pack_nibbles(codes), scales)
        n, k = self.shape[-2:]
        spread = spread.repeat_interleave(32, -2).repeat_interleave(32, -1)[..., :n, :k]
        return CanonicalWeight(self.format, formats.encode_e4m3(values * spread), scales)

    def slot(self, index: int) -> WeightHandle:
        if len(self.shape) != 3:
            raise BadCall(f"weight {self.role} has shape {list(self.shape)}: only stacked weights have slots")
        if not 0 <= index < self.shape[0]:
            raise BadCall(f"weight {self.role} has {self.shape[0]} slots, asked for {index}")
        panels, scales = self.packed
        kept = self._kept and CanonicalWeight(self.format, self._kept.values[index], scales[index])
        return PanelWeight(self.role, self.format, self.shape[1:], panels[index], None if scales is None else scales[index], kept)


def _plain(t: torch.Tensor | None) -> torch.Tensor | None:
    """float8 and int8 storage as bytes."""
    return t.view(torch.uint8) if t is not None and t.element_size() == 1 else t


def _invertible(canonical: CanonicalWeight) -> bool:
    """Whether float32 values and scales give the codes back: no NaN, no overflow."""
    if canonical.format in ("bf16", "f32"):
        return True
    scales = _plain(canonical.scales)
    if scales.numel() and int(scales.max()) > _LARGEST_INVERTIBLE_SCALE:
        return False
    return canonical.format == "fp4_row32" or not bool(((_plain(canonical.values) & 0x7F) == 0x7F).any())


def prepare_weight(role: str, canonical: CanonicalWeight) -> WeightHandle:
    """The handle of a weight for this backend; the checkpoint's own layout where it has no native kernels.

    Codes that float32 cannot give back (NaN, or a scale past 2^119) are kept beside the panels.
    """
    if native() is None:
        return WeightHandle(role, canonical)
    if _is_table(role, canonical.format):
        return TableWeight(role, canonical)
    shape = tuple(canonical.shape)
    if len(shape) < 2:
        raise BadCall(f"weight {role} has shape {list(shape)}; a weight is a matrix or a stack of matrices")
    *lead, n, k = shape
    values = canonical.dequantise()
    values = torch.nn.functional.pad(values, (0, 0, 0, -n % PANEL))
    panels = values.reshape(*lead, -1, PANEL, k).transpose(-1, -2).contiguous()
    scales = None if canonical.scales is None else _plain(canonical.scales).contiguous()
    return PanelWeight(role, canonical.format, shape, panels, scales, None if _invertible(canonical) else canonical)


def prepared_nbytes(role: str, shape: tuple[int, ...], format: str) -> int:
    """Bytes that `prepare_weight` holds for a weight of logical `shape` in a checkpoint `format`."""
    if native() is None or _is_table(role, format) or len(shape) < 2:
        return canonical_nbytes(format, shape)
    *lead, n, k = shape
    scales = {"fp8_block32": -(-n // 32) * -(-k // 32), "fp4_row32": n * (k // 32)}.get(format, 0)
    return math.prod(lead) * (-(-n // PANEL) * PANEL * k * 4 + scales)
