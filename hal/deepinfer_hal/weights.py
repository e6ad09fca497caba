"""Weight handles: one prepared layout per role and backend, shared by all of its kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer_hal import formats
from deepinfer_hal.errors import BadCall

FORMATS = ("bf16", "f32", "fp8_block32", "fp4_row32", "fp8_row32")


@dataclass(frozen=True)
class CanonicalWeight:
    """A weight as the checkpoint stores it.

    format: "bf16" | "f32" (values [..., N, K], no scales); "fp8_block32" (values uint8 e4m3 [..., N, K], scales uint8 ue8m0
    [..., ceil(N/32), ceil(K/32)]); "fp4_row32" (values uint8 [..., N, K/2], even column in the low nibble, scales
    [..., N, K/32]); "fp8_row32" (values uint8 [N, K], scales [N, K/32]).
    """

    format: str
    values: torch.Tensor
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise BadCall(f"weight format {self.format!r} is not one of {', '.join(FORMATS)}")
        if (self.scales is None) != (self.format in ("bf16", "f32")):
            raise BadCall(f"weight format {self.format} {'takes no' if self.scales is not None else 'needs'} scales")
        dense = {"bf16": torch.bfloat16, "f32": torch.float32}.get(self.format)
        for name, stored in (("values", self.values), ("scales", self.scales)):
            if stored is not None and (stored.dtype != dense if dense else stored.element_size() != 1):
                wanted = str(dense).removeprefix("torch.") if dense else "bytes"
                raise BadCall(f"weight format {self.format} keeps {name} as {wanted}, got {stored.dtype}")
        if self.scales is not None and tuple(self.scales.shape) != scale_shape(self.format, self.shape):
            wanted = list(scale_shape(self.format, self.shape))
            raise BadCall(f"{self.format} weight {list(self.shape)} needs scales {wanted}, got {list(self.scales.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        *lead, last = self.values.shape
        return (*lead, last * 2 if self.format == "fp4_row32" else last)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.values, self.scales) if t is not None)

    def dequantise(self) -> torch.Tensor:
        """float32 values [..., N, K]; exact for every format."""
        if self.format in ("bf16", "f32"):
            return self.values.float()
        if self.format == "fp8_row32":
            return formats.dequantise(self.values, self.scales, "fp8_32")
        decode = formats.dequantise_weight_fp8 if self.format == "fp8_block32" else formats.dequantise_weight_fp4
        if self.values.dim() == 2:
            return decode(self.values, self.scales)
        flat = [decode(v, s) for v, s in zip(self.values, self.scales, strict=True)]
        return torch.stack(flat) if flat else torch.zeros(self.shape, device=self.values.device)


def scale_shape(format: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a quantised weight of logical `shape` [..., N, K]; BadCall where K cannot be scaled."""
    *lead, rows, columns = shape
    if format == "fp8_block32":
        return (*lead, -(-rows // 32), -(-columns // 32))
    if columns % 32:
        raise BadCall(f"weight format {format} needs K divisible by 32, got {columns}")
    return (*lead, rows, columns // 32)


def concatenate(parts: Sequence[CanonicalWeight]) -> CanonicalWeight:
    """Parts stacked along N (dim -2); all of one format and, for fp8_block32, of N divisible by 32 but for the last."""
    if not parts:
        raise BadCall("cannot join no weights into one role")
    first = parts[0]
    if len(parts) == 1:
        return first
    kinds = {p.format for p in parts}
    if len(kinds) > 1:
        raise BadCall(f"cannot join weights of formats {', '.join(sorted(kinds))} into one role")
    for part in parts[1:]:
        if (*part.shape[:-2], part.shape[-1]) != (*first.shape[:-2], first.shape[-1]):
            raise BadCall(f"cannot join weights of shapes {list(first.shape)} and {list(part.shape)}: they may differ in N alone")
    if first.format == "fp8_block32":
        for part in parts[:-1]:
            if part.values.shape[-2] % 32:
                raise BadCall(f"cannot join fp8 32x32-block weights: {part.values.shape[-2]} rows is not a multiple of 32")
    values = torch.cat([p.values for p in parts], dim=-2)
    scales = None if first.scales is None else torch.cat([p.scales for p in parts], dim=-2)
    return CanonicalWeight(first.format, values, scales)


class WeightHandle:
    """A prepared weight. This base class keeps the canonical bytes; a backend subclasses it for its own layout.

    role: the use it was prepared for; shape: logical [..., N, K]; format: of the checkpoint; placement: "device" | "host" |
    "sharded".
    """

    placement = "device"

    def __init__(self, role: str, canonical: CanonicalWeight) -> None:
        self.role = role
        self._canonical = canonical
        self.shape, self.format = canonical.shape, canonical.format

    @property
    def nbytes(self) -> int:
        """Bytes that the prepared layout holds."""
        return self._canonical.nbytes

    def canonical(self) -> CanonicalWeight:
        """The checkpoint's bytes again, exactly."""
        return self._canonical

    def dequantise(self) -> torch.Tensor:
        """float32 values [..., N, K]: what the reference multiplies with."""
        return self.canonical().dequantise()

    def slot(self, index: int) -> WeightHandle:
        """Handle of one expert (leading dimension), a view of the same bytes."""
        whole = self.canonical()
        if len(self.shape) != 3:
            raise BadCall(f"weight {self.role} has shape {list(self.shape)}: only stacked weights have slots")
        if not 0 <= index < self.shape[0]:
            raise BadCall(f"weight {self.role} has {self.shape[0]} slots, asked for {index}")
        scales = None if whole.scales is None else whole.scales[index]
        return WeightHandle(self.role, CanonicalWeight(whole.format, whole.values[index], scales))


def prepare_canonical(role: str, canonical: CanonicalWeight) -> WeightHandle:
    """The default of Backend.prepare_weight: the checkpoint's own layout."""
    return WeightHandle(role, canonical)


def canonical_nbytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of a weight of logical `shape` in a checkpoint format. BadCall for an unknown format."""
    if format not in FORMATS:
        raise BadCall(f"weight format {format!r} is not one of {', '.join(FORMATS)}")
    values = math.prod(shape)
    if format in ("bf16", "f32"):
        return values * (2 if format == "bf16" else 4)
    return values // (2 if format == "fp4_row32" else 1) + math.prod(scale_shape(format, shape))
