"""Environments with a Triton for NVIDIA: `python tools/cuda/triton_venvs.py 3.6.0` prints that environment's Python.

3.6.0 is the version the kernels are written for, NEWEST the latest release they are assembled with.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from virtual_environment import EnvironmentFailed, environment  # noqa: E402

WRITTEN_FOR = "3.6.0"
NEWEST = "3.9.0"
INTERPRETER_NUMPY = "numpy<2.4"
"""The interpreter turns one-element arrays into loop bounds, which later releases of numpy refuse."""


def triton_python(version: str) -> Path:
    """Python of the environment with triton==version; EnvironmentFailed with pip's message if it cannot be had."""
    return environment(f"triton-{version}", [f"triton=={version}", INTERPRETER_NUMPY])


if __name__ == "__main__":
    try:
        print(triton_python(sys.argv[1] if len(sys.argv) > 1 else WRITTEN_FOR))
    except EnvironmentFailed as error:
        sys.exit(str(error))
