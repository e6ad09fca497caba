#!/usr/bin/env bash
# Builds the AscendC kernels with CANN's compiler into the library that the NPU device loads:
#   build_npu.sh [--npu-arch=dav-3510] [--dry-run]
# Every source is compiled by itself, so that one that fails does not hide the others; what compiled is linked. A second
# library holds the probe kernels. Logs are kept under build/npu. State: written, never run with CANN.
# Exit 0: all compiled; 1: some did not, the log names them; 2: there is no compiler, or no library could be made.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
arch=dav-3510 dry=
for argument in "$@"; do
  case $argument in
    --npu-arch=*) arch=${argument#*=} ;;
    --dry-run) dry=1 ;;
    *) echo "usage: $0 [--npu-arch=dav-3510] [--dry-run]" >&2; exit 2 ;;
  esac
done
compiler=${BISHENG:-bisheng}
build=${NPU_BUILD:-$root/build/npu}
destination=${NPU_DESTINATION:-$root/backends/ascend/deepinfer_ascend}
kernels=$root/kernels_ascendc
options=(-x asc "--npu-arch=$arch" -std=c++17 -O3 -fPIC -fvisibility=hidden
  "-I$kernels/npu/include" "-I$kernels" "-I$kernels/twin/probes" "-I$root/hal/include")
probes=("$kernels"/twin/probes/probe_{vector,other,reg,cube,sync}.asc)

if [ -z "$dry" ] && ! command -v "$compiler" >/dev/null; then
  echo "no $compiler on PATH: install CANN's toolkit (9.0 or later) and source its set_env.sh; BISHENG names another compiler" >&2
  exit 2
fi

run() { # run LOG COMMAND...: the command, with what it says in LOG
  local log=$1
  shift
  if [ -n "$dry" ]; then echo "$*"; return 0; fi
  "$@" >"$log" 2>&1
}

library() { # library NAME SOURCE...: compiles each source, links those that compiled, says what failed
  local name=$1 objects=() sources=() failed=() source base
  shift
  for source in "$@"; do
    base=$(basename "$source" .asc)
    if run "$build/$base.log" "$compiler" "${options[@]}" -c "$source" -o "$build/$base.o"; then
      objects+=("$build/$base.o") sources+=("$source")
    else
      failed+=("$base")
      echo "FAILED $base: $(grep -m1 -i error "$build/$base.log" || tail -1 "$build/$base.log"); see $build/$base.log"
    fi
  done
  [ -n "$dry" ] || echo "$name: ${#objects[@]} of $# sources compiled"
  if [ "${#objects[@]}" -eq 0 ]; then return 2; fi
  run "$build/$name.log" "$compiler" "--npu-arch=$arch" -shared -fPIC "${objects[@]}" -lascendcl -o "$build/$name.so" ||
    run "$build/$name.log" "$compiler" "${options[@]}" -shared "${sources[@]}" -lascendcl -o "$build/$name.so" ||
    { echo "FAILED to link $name: $(tail -1 "$build/$name.log"); see $build/$name.log"; return 2; }
  if [ -z "$dry" ]; then
    describe "${failed[@]+"${failed[@]}"}" >"$destination/$name.json"
    cp "$build/$name.so" "$destination/.new_npu" && mv "$destination/.new_npu" "$destination/$name.so"
  fi
  [ "${#failed[@]}" -eq 0 ]
}

describe() { # describe FAILED...: what the library is, as JSON
  local home=${ASCEND_HOME_PATH:-} cann=unknown file failed=
  for file in "$home/version.cfg" "$home/compiler/version.info" "$home/runtime/version.info"; do
    if [ -r "$file" ]; then cann=$(sed -n 's/^[Vv]ersion *= *\[\{0,1\}\([0-9A-Za-z._-]*\).*/\1/p' "$file" | head -1); break; fi
  done
  [ $# -eq 0 ] || failed=$(printf '"%s", ' "$@")
  printf '{"architecture": "%s", "cann": "%s", "compiler": "%s", "sources": "%s", "failed": [%s]}\n' "$arch" "${cann:-unknown}" \
    "$("$compiler" --version 2>/dev/null | head -1 | tr -d '"\\')" \
    "$(cat "$kernels"/*.asc "$kernels"/*.h "$kernels"/npu/include/*.h | sha256sum | cut -c1-16)" "${failed%, }"
}

[ -n "$dry" ] || mkdir -p "$build"
status=0
library libdeepinfer_npu "$kernels"/*.asc || status=$?
library libdeepinfer_npu_probes "${probes[@]}" || { [ $status -ne 0 ] || status=1; }
exit $status
