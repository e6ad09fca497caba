#!/usr/bin/env bash
# Builds the AscendC kernels with CANN's compiler into the library that the NPU device loads:
#   build_npu.sh [--npu-arch=dav-3510] [--dry-run]                   the kernels
#   build_npu.sh --probes=FILE [--npu-arch=dav-3510] [--dry-run]     the probes that `run_probes.py builds` lists in FILE
# Every kernel source is compiled by itself, so that one that fails does not hide the others; what compiled is linked. Each
# probe is a library of its own, for the same reason. Logs are kept under build/npu. State: written, never run with CANN.
# Exit 0: all compiled; 1: some did not, the log names them; 2: there is no compiler, or no library could be made.
set -uo pipefail
export LC_ALL=C  # the order of files, which the digest of the sources depends on
root=$(cd "$(dirname "$0")/../.." && pwd)
arch=dav-3510 dry= probes=
for argument in "$@"; do
  case $argument in
    --npu-arch=*) arch=${argument#*=} ;;
    --dry-run) dry=1 ;;
    --probes=*) probes=${argument#*=} ;;
    *) echo "usage: $0 [--npu-arch=dav-3510] [--probes=FILE] [--dry-run]" >&2; exit 2 ;;
  esac
done
compiler=${BISHENG:-bisheng}
build=${NPU_BUILD:-$root/build/npu}
destination=${NPU_DESTINATION:-$root/backends/ascend/deepinfer_ascend}
kernels=$root/kernels_ascendc
options=(-x asc "--npu-arch=$arch" -std=c++17 -O3 -fPIC -fvisibility=hidden
  "-I$kernels/npu/include" "-I$kernels" "-I$kernels/twin/probes" "-I$root/hal/include")

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

probe_library() { # probe_library NAME SOURCE OPTION...: one probe, compiled and linked at once
  local name=$1 source=$root/$2
  shift 2
  run "$build/probes/$name.log" "$compiler" "${options[@]}" "$@" -shared "$source" -lascendcl -o "$build/probes/$name.so" ||
    { rm -f "$build/probes/$name.so"; echo "FAILED $name: $(grep -m1 -i error "$build/probes/$name.log"); see $build/probes/$name.log"; }
}

all_probes() { # compiles what the file lists, several at a time
  local line fields running=0
  while IFS= read -r line; do
    IFS=$'\t' read -r -a fields <<<"$line"
    if [ -n "$dry" ]; then probe_library "${fields[@]}"; continue; fi
    probe_library "${fields[@]}" &
    running=$((running + 1))
    if [ "$running" -ge "${NPU_JOBS:-4}" ]; then wait -n; running=$((running - 1)); fi
  done <"$probes"
  wait
  [ -z "$dry" ] || return 0
  local made wanted
  made=$(find "$build/probes" -name '*.so' | wc -l) wanted=$(wc -l <"$probes")
  echo "probes: $made of $wanted compiled"
  [ "$made" -eq "$wanted" ] || { [ "$made" -gt 0 ] && return 1; return 2; }
}

if [ -n "$probes" ]; then
  if [ -z "$dry" ]; then rm -rf "$build/probes"; mkdir -p "$build/probes"; fi
  all_probes
else
  [ -n "$dry" ] || mkdir -p "$build"
  library libdeepinfer_npu "$kernels"/*.asc
fi
