#!/bin/sh
# Builds the CPU kernels in place, for a checkout that is not installed: backends/cpu/deepinfer_cpu/_native*.so.
# The new file replaces the old one in one step, so processes that have the old one loaded go on undisturbed.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
build=${BUILD_DIR:-$root/build/native}
pybind11=$("$python" -m pybind11 --cmakedir)
cmake -S "$root" -B "$build" -G "${GENERATOR:-Ninja}" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" \
  -Dpybind11_DIR="$pybind11" >/dev/null
cmake --build "$build" --parallel "${JOBS:-2}"
for built in "$build"/backends/cpu/native/_native*.so; do
  name=$(basename "$built")
  cp "$built" "$root/backends/cpu/deepinfer_cpu/.$name.new"
  mv "$root/backends/cpu/deepinfer_cpu/.$name.new" "$root/backends/cpu/deepinfer_cpu/$name"
done
