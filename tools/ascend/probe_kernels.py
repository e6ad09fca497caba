"""The probe kernels' numbers for types, instructions and products, and what a probe is: shared by tests and the bring-up.

A probe is one call of a probe kernel (kernels_ascendc/twin/probes) on images of bytes: the twin says what must come out,
and a device is compared with that.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

TYPES = {
    "float": (0, np.float32),
    "half": (1, np.float16),
    "bfloat16_t": (2, ml_dtypes.bfloat16),
    "int32_t": (3, np.int32),
    "uint32_t": (4, np.uint32),
    "int16_t": (5, np.int16),
    "uint16_t": (6, np.uint16),
    "int8_t": (7, np.int8),
    "uint8_t": (8, np.uint8),
    "int64_t": (9, np.int64),
    "fp8_e4m3fn_t": (11, ml_dtypes.float8_e4m3fn),
    "fp8_e5m2_t": (12, ml_dtypes.float8_e5m2),
    "fp4x2_e2m1_t": (13, np.uint8),
}
VECTOR = (
    "Add Sub Mul Div Max Min And Or Xor MulAddDst Exp Ln Abs Reciprocal Sqrt Rsqrt Relu Neg Not Copy "
    "Adds Muls Maxs Mins ShiftLeft ShiftRight LeakyRelu Axpy Duplicate"
).split()
OTHER = (
    "Cast ReduceSum ReduceMax ReduceMin RepeatSum RepeatMax RepeatMin BlockSum BlockMax BlockMin Brcb Compare Compares "
    "Select Gather GatherMask Index Interleave DeInterleave"
).split()
CUBE = {"float": 0, "half": 1, "bf16": 2, "bf16_out": 3, "e4m3": 4, "mx_e4m3": 5, "mx_e2m1": 6, "mix": 7}
ROUND = {"NONE": 0, "RINT": 1, "FLOOR": 2, "CEIL": 3, "ROUND": 4, "TRUNC": 5, "ODD": 6}
CONTIGUOUS = (1, 1, 1, 8, 8, 8)
EMPTY = np.zeros(0, np.uint8)


@dataclass(frozen=True, eq=False)
class Probe:
    """One call. tensors: images that the kernel reads, `out` the one that it leaves its result in. view: how the result's
    bytes are read when they differ. units: units in the last place that a chip may be off, None: whatever is found is
    only told, for things that no page settles. defines: what narrows the kernel's source to this instruction and type
    for a device build, so that one which does not compile takes no other along.
    """

    name: str
    kernel: str
    tensors: tuple[np.ndarray, ...]
    out: int
    integers: tuple[int, ...]
    reals: tuple[float, ...] = ()
    view: str = "uint8_t"
    units: int | None = 0
    defines: tuple[str, ...] = ()

    @property
    def library(self) -> str:
        """Name of the device library with this probe: of its kernel and what narrows it."""
        parts = [define.partition("=")[2].replace(" ", "").replace(",", "-") for define in self.defines]
        return "-".join([self.kernel, *parts])


def image(array: np.ndarray) -> np.ndarray:
    """An array's bytes, as kernels see them."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy()
