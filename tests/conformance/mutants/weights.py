"""Prepared weights: bytes that do not come back, slots that are not the experts, sizes that are not true."""

from __future__ import annotations

import torch
from deepinfer_hal.card import get_card
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from tests.conformance.mutants import right
from tests.conformance.mutants._base import Host, Mutant, kernel

CODED = "linear(T=3,K=64,N=32,x=bf16,w=fp8_block32,out=f32)"
EXPERTS = "grouped_gemm(M=9,E=4,K=64,N=32,x=bf16,w=fp4_row32,out=f32)"


class PositiveZeros(Host):
    """Its layout turns the codes of -0 into those of 0."""

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        values = torch.where(canonical.values == 0x80, 0, canonical.values)
        return WeightHandle(role, CanonicalWeight(canonical.format, values, canonical.scales))


class ClampedScales(Host):
    """Keeps scales in a format that has no room for the largest."""

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        scales = canonical.scales.clamp(max=200)
        return WeightHandle(role, CanonicalWeight(canonical.format, canonical.values, scales))


class WrongSize(Host):
    """Forgets the scales where it plans memory."""

    def prepared_nbytes(self, role: str, shape: tuple[int, ...], format: str) -> int:
        return super().prepared_nbytes(role, shape, format) // 33 * 32


class StaleSlot(WeightHandle):
    """Slots are kept by role and number, also when another weight has come into their place."""

    _slots: dict[tuple[str, int], WeightHandle]

    def slot(self, index: int) -> WeightHandle:
        return self._slots.setdefault((self.role, index), super().slot(index))


class StaleSlots(Host):
    def __init__(self, *kernels) -> None:
        super().__init__(*kernels)
        self._slots: dict[tuple[str, int], WeightHandle] = {}

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        handle = StaleSlot(role, canonical)
        handle._slots = self._slots
        return handle


class ShiftedSlot(WeightHandle):
    """slot(e).canonical() has the scales of the first expert."""

    def slot(self, index: int) -> WeightHandle:
        made = super().slot(index)
        made.canonical = lambda: CanonicalWeight(self._canonical.format, self._canonical.values[index], self._canonical.scales[0])
        made.dequantise = super().slot(index).dequantise
        return made


class ShiftedSlots(Host):
    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        return ShiftedSlot(role, canonical)


def in_place(x, x_scale, weight, count, out, out_scale) -> None:
    right.linear(x, x_scale, weight, count, out, out_scale)
    values = weight.canonical().values
    values[values & 0xF == 8] &= 0xF0


def linear(name: str, backend: type[Host], killed_by: tuple[str, ...], why: str, fn=right.linear, case=CODED) -> Mutant:
    return Mutant(name, "linear", case, lambda: backend(kernel("linear", name, fn, "yes")), killed_by, why,
                  right=right.linear_kernel)  # fmt: skip


def experts(name: str, backend: type[Host], killed_by: tuple[str, ...], why: str) -> Mutant:
    reference = get_card("grouped_gemm").reference
    return Mutant(name, "grouped_gemm", EXPERTS, lambda: backend(kernel("grouped_gemm", name, reference)), killed_by, why)


MUTANTS = [
    linear("weight_loses_negative_zero", PositiveZeros, ("weights",), "canonical() gives 0 back where the checkpoint has -0."),
    linear("weight_loses_a_large_scale", ClampedScales, ("weights",), "Scales are kept in a smaller range than they have."),
    linear("prepared_nbytes_without_scales", WrongSize, ("weights",), "The planned size of a weight leaves its scales out."),
    linear("weight_rewritten", Host, ("inputs", "weights"), "The kernel rewrites codes of -0 in its weight.", in_place,
           "linear(T=3,K=64,N=32,x=bf16,w=fp4_row32,out=f32)"),
    experts("slot_of_an_older_weight", StaleSlots, ("weights",),
            "slot(e) is kept by role, so it shows an expert that was replaced."),
    experts("slot_with_the_first_scales", ShiftedSlots, ("weights",), "Every slot's canonical() has the first expert's scales."),
]  # fmt: skip
