"""Runs one instruction of the twin between byte images of UB, through the probe kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
for folder in ("backends/ascend", "tests/conformance", "tools/ascend"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

from deepinfer_ascend import twin  # noqa: E402
from probe_kernels import CONTIGUOUS, EMPTY, OTHER, ROUND, TYPES, VECTOR  # noqa: E402

__all__ = ["CONTIGUOUS", "EMPTY", "OTHER", "ROUND", "TYPES", "VECTOR", "kernel", "missing", "other", "tensor", "vector"]


def missing() -> str | None:
    """Why the probes cannot run, or None."""
    module = twin.module()
    if module is None:
        return str(twin.unavailable_reason())
    return None if module.has("probe_vector") else "the twin was built without its probes"


def tensor(array: np.ndarray) -> torch.Tensor:
    """The bytes of an array as a tensor that shares them."""
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy())


def kernel(name: str, tensors: int, ints: int, reals: int):
    """A probe's C function as a callable."""
    names = [f"t{i}" for i in range(tensors)] + [f"i{i}" for i in range(ints)] + [f"d{i}" for i in range(reals)]
    return twin.module().bind(name, "t" * tensors + "i" * ints + "d" * reals, names)


def _run(name, head, x0, x1, y, tail, scalar):
    out = tensor(y)
    kernel(name, 3, 13, 1)(tensor(x0), tensor(x1), out, *head, *tail, float(scalar))
    return out.numpy().view(y.dtype).reshape(y.shape)


def vector(
    op, dtype, x0, x1=EMPTY, y=None, *, count=None, lanes=None, mask=(0, 0), repeats=1, strides=CONTIGUOUS, scalar=0.0
):
    """One instruction of the vector unit by count, by `lanes` or by mask bits; gives what y holds afterwards."""
    y = np.zeros_like(x0) if y is None else y
    sliced = lanes is not None or any(mask)
    head = (
        VECTOR.index(op),
        TYPES[dtype][0],
        -1 if sliced else len(x0) if count is None else count,
        -1 if lanes is None else lanes,
    )
    words = [int(np.uint64(m).view(np.int64)) for m in mask]
    return _run("probe_vector", head, x0, x1, y, (*words, repeats, *strides), scalar)


def other(
    op, to, x0, x1=EMPTY, y=None, *, source=None, mode=0, count=-1, lanes=0, repeats=1, strides=CONTIGUOUS, scalar=0.0
):
    """A cast, reduction, comparison, selection or gather; gives what y holds afterwards."""
    head = (OTHER.index(op), TYPES[to][0], TYPES[source or to][0], mode, count, lanes)
    return _run("probe_other", head, x0, x1, y, (repeats, *strides), scalar)
