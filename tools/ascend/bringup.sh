#!/usr/bin/env bash
# Brings this project up on an Ascend 950, step by step; docs/ascend-bringup.md says what each step proves.
#   bringup.sh [--device=0] [--out=DIR] [--steps=versions,probes,...]
#   bringup.sh --twin [--out=DIR] [--steps=...]      the same steps through the same code, as far as they need no NPU
# Every step is tried, whatever became of the one before, and leaves a log. At the end stand a table, what to send back for
# each step that failed, and an archive with everything. Exit 0: no step failed; 1: one did; 2: the command line was wrong.
# State: written; only --twin has ever run.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
device=0 twin= out= steps=versions,twin,build,probe-builds,probes,smoke,conformance,vendor-ops,generate
for argument in "$@"; do
  case $argument in
    --twin) twin=1 ;;
    --device=*) device=${argument#*=} ;;
    --out=*) out=${argument#*=} ;;
    --steps=*) steps=${argument#*=} ;;
    *) echo "usage: $0 [--twin] [--device=N] [--out=DIR] [--steps=NAME,...]" >&2; exit 2 ;;
  esac
done
out=${out:-$root/build/bringup}
python=${PYTHON:-python3}
tools=$root/tools/ascend
export PYTHONPATH="$root:$root/hal:$root/backends/cpu:$root/backends/triton:$root/backends/ascend${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$twin" ]; then backend=ascend:twin; else backend=ascend:$device; fi
mkdir -p "$out"
cd "$root" || exit 2
table=() advice=() failed=

step() { # step NAME SECONDS WHAT-TO-SEND COMMAND...: runs it if it was asked for, with a log and a limit of time
  local name=$1 seconds=$2 send=$3 status started=$SECONDS
  shift 3
  case ,$steps, in *,"$name",*) ;; *) return 0 ;; esac
  echo "== $name"
  timeout --kill-after=10 "$seconds" bash -c '"$@"' step "$@" >"$out/$name.log" 2>&1
  status=$?
  tail -n 4 "$out/$name.log" | cut -c1-240
  if [ $status -eq 0 ]; then
    table+=("$(printf '%-12s ok      %4d s' "$name" $((SECONDS - started)))")
    return 0
  fi
  failed=1
  [ $status -eq 124 ] && echo "no end within $seconds s" >>"$out/$name.log"
  table+=("$(printf '%-12s FAILED  %4d s  status %d' "$name" $((SECONDS - started)) $status)")
  advice+=("$name: send $out/$name.log and $send")
  "$python" -m deepinfer hal explain --backend ascend - <"$out/$name.log" 2>/dev/null | sed 's/^/   /' | head -20
}

later() { table+=("$(printf '%-12s needs an NPU' "$1")"); }

versions() {
  uname -srm
  "$python" -m deepinfer collect-env
  "$python" -m deepinfer hal list
  if [ -z "$twin" ]; then npu-smi info; bisheng --version; fi
  wanted_modules || return
  [ -n "$twin" ] || opens "$backend" # the twin opens once the next step has built it
}

wanted_modules() { # what the probes import, and pybind11 where the twin is still to be built
  "$python" -c 'import importlib.util
import sys
from deepinfer_ascend import twin
wanted = ["ml_dtypes"] + ["pybind11"] * (twin.module() is None)
lacking = [name for name in wanted if importlib.util.find_spec(name) is None]
sys.exit("wanted by the twin and its probes: pip install " + " ".join(lacking) if lacking else 0)'
}

opens() {
  "$python" -c 'import sys; from deepinfer_hal.registry import open_backend; print("opened", open_backend(sys.argv[1]))' "$1"
}

twin_expects() { # the model of the chip is what a chip is compared with: it must be there, whatever the machine
  "$python" -c 'from deepinfer_ascend import twin; raise SystemExit(twin.module() is None)' ||
    PYTHON=$python "$tools/build_twin.sh" || return
  opens ascend:twin && "$python" "$tools/run_probes.py" expect "$out/probes.npz"
}

probe_builds() {
  "$python" "$tools/run_probes.py" builds >"$out/probe-builds.txt" && "$tools/build_npu.sh" --probes="$out/probe-builds.txt" "$@"
}

nothing_to_prove() { # without an NPU the command must refuse, and say what is missing
  "$python" -m deepinfer hal prove --backend ascend:twin
  [ $? -eq 2 ]
}
export -f versions wanted_modules opens twin_expects probe_builds nothing_to_prove
export root out python tools backend twin

probes() { "$python" "$tools/run_probes.py" compare "$out/probes.npz" --report "$out/probes.json" "$@"; }
export -f probes

step versions 300 "what npu-smi info prints" versions
step twin 900 "the compiler's version (g++ --version)" twin_expects
if [ -n "$twin" ]; then
  step build 60 "" "$tools/build_npu.sh" --dry-run
  step probe-builds 60 "" probe_builds --dry-run
  step probes 600 "$out/probes.json" probes --device twin
  step smoke 600 "" "$python" "$tools/kernel_smoke.py" "$backend" embedding_gather rms_norm
  step conformance 900 "$out/hal-report.json" "$python" -m deepinfer hal test --backend "$backend" --profile core --op stream_collapse \
    --report "$out/hal-report.json"
  step vendor-ops 300 "" nothing_to_prove
  later generate
else
  step build 3600 "the logs in build/npu" "$tools/build_npu.sh"
  step probe-builds 7200 "the logs in build/npu/probes" probe_builds
  step probes 7200 "$out/probes.json" probes --device "npu:$device" --libraries "$root/build/npu/probes"
  step smoke 3600 "$HOME/ascend/log" "$python" "$tools/kernel_smoke.py" "$backend"
  step conformance 14400 "$out/hal-report.json and $HOME/ascend/log" "$python" -m deepinfer hal test --backend "$backend" --profile core \
    --report "$out/hal-report.json"
  step vendor-ops 3600 "the line of each op" "$python" -m deepinfer hal prove --backend "$backend"
  step generate 1800 "$HOME/ascend/log" "$python" -m deepinfer generate --backend "$backend" --model nano --temperature 0 --max-tokens 32 \
    "Once upon a time"
fi

printf '%s\n' "${table[@]}" | tee "$out/summary.txt"
if [ ${#advice[@]} -gt 0 ]; then printf '%s\n' "${advice[@]}" | tee -a "$out/summary.txt"; fi
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")" && echo "everything: $out.tar.gz"
[ -z "$failed" ]
