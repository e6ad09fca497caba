"""Which sources a kernel library was made from: one digest that its builder stores and its user compares.

Nothing but the standard library, since the build tools import it before anything is installed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ARCHITECTURE = "sm_90a"
"""What the CUDA C++ kernels are made for: wgmma and setmaxnreg exist there and nowhere else."""


def source_folder() -> Path | None:
    """kernels_cuda of the source tree, or None where the package was installed without it."""
    folder = Path(__file__).resolve().parents[3] / "kernels_cuda"
    return folder if folder.is_dir() else None


def sources_digest(folder: Path) -> str:
    """Of names and contents of everything that is compiled, in 16 digits: *.cu, *.cuh, and the C ABI's header."""
    digest = hashlib.sha256()
    header = folder.parent / "hal/include/deepinfer/hal.h"
    for path in (*sorted(folder.glob("*.cu")), *sorted(folder.glob("*.cuh")), header):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def package_digest(package: Path) -> str:
    """Of the Python files of a package whose kernels are compiled at their first launch, in 16 digits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
