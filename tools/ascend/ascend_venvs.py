"""Environments of the Ascend checks: `python tools/ascend/ascend_venvs.py KIND` prints one's Python.

lowering: triton-ascend and the Ascend 950 compiler's front half (ascendnpu-ir). torch_npu: torch_npu over the maker's
torch, which must be 2.13.0 built for the CPU. clang: the compiler that the ziglang package carries. None of them needs an
NPU or CANN. build: what builds the twin beside an installed package: cmake, ninja, pybind11.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from virtual_environment import EnvironmentFailed, environment  # noqa: E402

TORCH = "2.13.0"
LOWERING = [
    "triton-ascend==3.2.0",
    "ascendnpu-ir==1.2.0",
    "pybind11",
    "pyyaml",
    "attrs",
    "decorator",
    "psutil",
    "scipy",
]
BUILD = ["cmake>=3.20", "ninja", "pybind11>=2.12"]
CLANG = ["ziglang==0.17.1"]
TORCH_NPU = [f"torch-npu=={TORCH}", "pyyaml"]


def lowering_python() -> Path:
    """Python of the environment with triton-ascend and ascendnpu-ir."""
    return environment("ascend-lowering", LOWERING)


def torch_npu_python() -> Path:
    """Python of the environment with torch_npu; EnvironmentFailed when the maker's torch is another version."""
    torch = importlib.metadata.version("torch")
    if torch.split("+")[0] != TORCH:
        raise EnvironmentFailed(f"torch_npu {TORCH} needs torch {TORCH}, this Python has {torch}")
    return environment("torch-npu", TORCH_NPU)


def clang_python() -> Path:
    """Python of the environment whose ziglang package carries clang."""
    return environment("ascend-clang", CLANG)


def build_python() -> Path:
    """Python of the environment with what builds the twin."""
    return environment("ascend-build", BUILD)


if __name__ == "__main__":
    makers = {"lowering": lowering_python, "torch_npu": torch_npu_python, "clang": clang_python, "build": build_python}
    if len(sys.argv) != 2 or sys.argv[1] not in makers:
        sys.exit(f"usage: {sys.argv[0]} {' | '.join(makers)}")
    try:
        print(makers[sys.argv[1]]())
    except EnvironmentFailed as error:
        sys.exit(str(error))
