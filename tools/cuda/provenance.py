"""Which kernels a benchmark timed: the build they are of and their symbols, in the words of a conformance report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_cuda import native_library
from deepinfer_cuda.backend import CudaBackend
from deepinfer_hal.conformance.host import describe_host, describe_suite


def provenance(symbols: Mapping[str, str] | None = None, library: Path = native_library.LIBRARY) -> dict[str, Any]:
    """build, host and suite as a conformance report has them, and symbols by op where a tool's rows do not name them.

    `library` is that of the CUDA C++ kernels. tools/cuda/same_kernels.py holds build and symbols against such a report.
    """
    build = {**CudaBackend().describe_build(), "cuda c++ kernels": native_library.part(library).found}
    told = {"build": build, "host": describe_host(), "suite": describe_suite()}
    return told if symbols is None else {**told, "symbols": dict(sorted(symbols.items()))}
