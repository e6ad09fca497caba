#!/usr/bin/env bash
# Builds the twin with all AscendC kernels and puts the module beside the Ascend backend: build_twin.sh [cmake options].
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
build=${TWIN_BUILD:-$root/build/twin}
generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
cmake -S "$root/kernels_ascendc" -B "$build" "${generator[@]}" -DPython_EXECUTABLE="$(command -v "$python")" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" "$@" >"${TMPDIR:-/tmp}/twin_configure.log" ||
  { cat "${TMPDIR:-/tmp}/twin_configure.log"; exit 1; }
cmake --build "$build" --parallel "${TWIN_JOBS:-2}"
destination=${TWIN_DESTINATION:-$root/backends/ascend/deepinfer_ascend}
for module in "$build"/_twin*.so; do
  cp "$module" "$destination/.new_twin" && mv "$destination/.new_twin" "$destination/$(basename "$module")"
done
