"""What is known of the library of CUDA C++ kernels beside this file: what it was built for, with what, from which sources.

`tools/cuda/build_kernels.sh`, or the package's own build, makes the library and the JSON file that describes it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.parts import Part

from deepinfer_cuda.kernel_sources import ARCHITECTURE, source_folder, sources_digest

LIBRARY = Path(__file__).with_name("libdeepinfer_cuda.so")
CAPABILITY = (9, 0)
"""The compute capability that runs sm_90a; nothing else does."""

NOT_BUILT = Path(__file__).with_name("cuda_not_built.txt")
"""Why the package was installed without the library; the build leaves it."""


def description(library: Path = LIBRARY) -> dict[str, Any]:
    """architecture, nvcc, sources (a digest), kernels (by name: registers, shared bytes, ...). BackendUnavailable if the file
    cannot be read."""
    path = library.with_suffix(".json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendUnavailable(f"{path} does not describe the kernel library ({error}); build it again") from error
    if not isinstance(found, dict) or not {"architecture", "nvcc", "sources", "kernels"} <= set(found):
        raise BackendUnavailable(f"{path} does not say what the kernel library is; build it again")
    return found


def part(library: Path = LIBRARY) -> Part:
    """Whether there is a library for the architecture, in the words of `hal list`."""
    wanted = f"{library.name} for {ARCHITECTURE}"
    if not library.is_file():
        why = NOT_BUILT.read_text(encoding="utf-8").strip() if NOT_BUILT.is_file() else "tools/cuda/build_kernels.sh builds it"
        return Part("CUDA C++ kernels", wanted, f"none ({why})", False)
    try:
        told = description(library)
    except BackendUnavailable as error:
        return Part("CUDA C++ kernels", wanted, str(error), False)
    built = f"{len(told['kernels'])} kernels built with nvcc {told['nvcc']} from sources {told['sources']}"
    found = f"{told['architecture']}, {built}"
    if told["sources"] not in (None, present_sources()):
        found += ", which are not those beside it: build it again"
    return Part("CUDA C++ kernels", wanted, found, told["architecture"] == ARCHITECTURE)


@functools.cache
def present_sources() -> str | None:
    """Digest of the sources in this tree; of the library's own where it was installed without them."""
    folder = source_folder()
    return description()["sources"] if folder is None else sources_digest(folder)
