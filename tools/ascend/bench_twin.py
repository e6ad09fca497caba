"""The twin's own speed: cost of a launch, cube GFLOP/s a core, vector nanoseconds per 64 lanes. Race detection is on.

    python tools/ascend/bench_twin.py [--json reports/ascend/twin-bench.json]

Judged are a launch of all 108 cores, products of at least 64 rows, and vector instructions of 16384 lanes; what an instruction
of 64 lanes costs as a whole is printed beside them.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "hal"), str(ROOT / "backends/ascend")]

from deepinfer_ascend import twin  # noqa: E402

EMPTY, EMPTY_MIX, VECTOR, REGISTER, CUBE = range(5)
TARGETS = {"launch_ms": 0.3, "cube_gflops": 50.0, "vector_ns": 10.0}
OPS = (("Add", 0), ("Muls", 1), ("Exp", 2), ("Cast float to bf16", 3))
COUNTS = (64, 1024, 16384)
PRODUCTS = ((128, 128, 128), (64, 256, 128), (16, 128, 256))


def best_ms(bench: Any, stream: Any, x: torch.Tensor, *ints: int, repeats: int = 15) -> float:
    """Shortest launch of several, in milliseconds: other load on the machine only adds."""
    times = []
    for _ in range(repeats):
        bench(x, *ints, stream=stream)
        times.append(stream.launch_ms)
    return min(times)


def measure(module: Any) -> dict[str, Any]:
    """All figures of one run."""
    names = ["x", "kind", "rounds", "a", "b", "c", "blocks"]
    bench, stream = module.bind("probe_bench", "tiiiiii", names), module.Stream()
    x = torch.ones(1 << 20, dtype=torch.bfloat16)
    vector = {}
    for name, op in OPS:
        vector[name] = {}
        for count in COUNTS:
            rounds = 400_000 // (count // 64 + 40)
            ns = best_ms(bench, stream, x, VECTOR, rounds, count, op, 0, 1) * 1e6 / (rounds * (count / 64))
            vector[name][str(count)] = round(ns, 2)
    register = best_ms(bench, stream, x, REGISTER, 50, 0, 0, 0, 1) * 1e6 / (50 * 256)
    cube = {}
    for m, n, k in PRODUCTS:
        ms = best_ms(bench, stream, x, CUBE, 60, m, n, k, 1)
        cube[f"{m} x {n} x {k}"] = round(2 * m * n * k * 60 / (ms * 1e6), 1)
    return {
        "launch_ms": round(best_ms(bench, stream, x, EMPTY_MIX, 0, 0, 0, 0, 36), 4),
        "vector_ns_per_64_lanes": vector,
        "register_loop_ns_per_64_lanes": round(register, 2),
        "cube_gflops": cube,
    }


def judge(found: dict[str, Any]) -> dict[str, bool]:
    """Which targets hold."""
    large = [found["cube_gflops"][f"{m} x {n} x {k}"] for m, n, k in PRODUCTS if m >= 64]
    slowest = max(by_count[str(COUNTS[-1])] for by_count in found["vector_ns_per_64_lanes"].values())
    return {
        "launch_ms": found["launch_ms"] <= TARGETS["launch_ms"],
        "cube_gflops": min(large) >= TARGETS["cube_gflops"],
        "vector_ns": slowest <= TARGETS["vector_ns"],
    }


def processor() -> str:
    """The name of this machine's processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    chosen = options.parse_args(arguments)
    module = twin.module()
    if module is None or not module.has("probe_bench"):
        print(twin.unavailable_reason() or "the twin was built without its probes")
        return 1
    found = measure(module)
    held = judge(found)
    print(f"instruction level: {module.level()}")
    print(f"launch, 36 cube and 72 vector cores: {found['launch_ms']:.3f} ms (at most {TARGETS['launch_ms']})")
    for name, by_count in found["vector_ns_per_64_lanes"].items():
        for count, ns in by_count.items():
            print(f"{name:20s} count {count:>6s}: {ns:6.2f} ns per 64 lanes")
    print(f"register loop, two loads, Add and a store: {found['register_loop_ns_per_64_lanes']:.2f} ns per 64 lanes")
    for name, gflops in found["cube_gflops"].items():
        print(f"Mmad bf16 {name}: {gflops:.1f} GFLOP/s")
    print("targets: " + ", ".join(f"{name} {'met' if ok else 'missed'}" for name, ok in held.items()))
    if chosen.json is not None:
        command = shlex.join(["python", "tools/ascend/bench_twin.py", *(arguments or sys.argv[1:])])
        machine = {"processor": processor(), "instruction_level": module.level()}
        record = {"command": command, **machine, "targets": TARGETS, "met": held, **found}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(held.values()) else 2


if __name__ == "__main__":
    sys.exit(main())
