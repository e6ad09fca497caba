#!/usr/bin/env bash
# Builds libdeepinfer_cuda.so, the CUDA C++ kernels for sm_90a, beside the CUDA backend. Needs nvcc 13 or later and no GPU.
#   tools/cuda/build_kernels.sh [build folder]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$root/build/cuda}
cmake -S "$root/kernels_cuda" -B "$build" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$root/backends/cuda/deepinfer_cuda" >"$build.configure.log" 2>&1 ||
  { cat "$build.configure.log" >&2; exit 1; }
cmake --build "$build" --parallel "${JOBS:-2}"
