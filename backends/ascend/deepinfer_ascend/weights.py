"""Weights of the Ascend backend: the checkpoint's own bytes, as the cube and the gathering kernels read them."""

from __future__ import annotations

import torch
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from deepinfer_ascend import twin

_STRIDED = 0  # di_layout


def _plain(t: torch.Tensor | None) -> torch.Tensor | None:
    """float8 and int8 storage as bytes, contiguous."""
    if t is None:
        return None
    return (t.view(torch.uint8) if t.element_size() == 1 else t).contiguous()


class PlainWeight(WeightHandle):
    """The canonical bytes, on the device that they were given on. Packed FP4 keeps two values a byte: the stored row
    stride is then half of the logical K."""

    def __init__(self, role: str, canonical: CanonicalWeight) -> None:
        super().__init__(role, CanonicalWeight(canonical.format, _plain(canonical.values), _plain(canonical.scales)))

    def slot(self, index: int) -> WeightHandle:
        whole = self.canonical()
        if len(self.shape) != 3:
            raise BadCall(f"weight {self.role} has shape {list(self.shape)}: only stacked weights have slots")
        if not 0 <= index < self.shape[0]:
            raise BadCall(f"weight {self.role} has {self.shape[0]} slots, asked for {index}")
        scales = None if whole.scales is None else whole.scales[index]
        return type(self)(self.role, CanonicalWeight(whole.format, whole.values[index], scales))


class TwinWeight(PlainWeight):
    """A plain weight with the reference that kernels on the twin read."""

    def __init__(self, role: str, canonical: CanonicalWeight) -> None:
        super().__init__(role, canonical)
        whole = self.canonical()
        self.native = twin.module().packed_ref(whole.values, whole.scales, _STRIDED, list(self.shape))
