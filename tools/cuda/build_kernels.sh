#!/usr/bin/env bash
# Builds libdeepinfer_cuda.so, the CUDA C++ kernels for sm_90a, beside the CUDA backend, with the JSON file that describes it.
# Needs nvcc 13 or later, CMake and Python 3.11, and no GPU. A kernel that spills fails the build.
#   [JOBS=2] tools/cuda/build_kernels.sh [build folder]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$root/build/cuda}
mkdir -p "$build"
python=$(command -v "${PYTHON:-python3}")
cmake -S "$root/kernels_cuda" -B "$build" -DPython_EXECUTABLE="$python" \
  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$root/backends/cuda/deepinfer_cuda" >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log" >&2; exit 1; }
cmake --build "$build" --parallel "${JOBS:-2}"
