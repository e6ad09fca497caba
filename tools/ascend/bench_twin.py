"""The twin's own speed: cost of a launch, cube GFLOP/s a core, vector nanoseconds per 64 lanes. Race detection is on.

PYTHONPATH=hal:backends/ascend python tools/ascend/bench_twin.py
"""

from __future__ import annotations

import sys

import torch
from deepinfer_ascend import twin

EMPTY, EMPTY_MIX, VECTOR, REGISTER, CUBE = range(5)
TARGETS = {"launch_ms": 0.3, "cube_gflops": 50.0, "vector_ns": 10.0}


def best_ms(bench, stream, x, *ints, repeats: int = 7) -> float:
    """Shortest launch of several, in milliseconds."""
    times = []
    for _ in range(repeats):
        bench(x, *ints, stream=stream)
        times.append(stream.launch_ms)
    return min(times)


def main() -> int:
    module = twin.module()
    if module is None or not module.has("probe_bench"):
        print(twin.unavailable_reason() or "the twin was built without its probes")
        return 1
    names = ["x", "kind", "rounds", "a", "b", "c", "blocks"]
    bench, stream = module.bind("probe_bench", "tiiiiii", names), module.Stream()
    x = torch.ones(1 << 20, dtype=torch.bfloat16)
    print(f"instruction level: {module.level()}")
    launch = best_ms(bench, stream, x, EMPTY_MIX, 0, 0, 0, 0, 36)
    print(f"launch, 36 cube and 72 vector cores: {launch:.3f} ms (at most {TARGETS['launch_ms']})")
    slowest = 0.0
    for name, op in (("Add", 0), ("Muls", 1), ("Exp", 2), ("Cast float to bf16", 3)):
        for count in (64, 1024, 16384):
            rounds = 400_000 // (count // 64 + 40)
            ns = best_ms(bench, stream, x, VECTOR, rounds, count, op, 0, 1) * 1e6 / (rounds * (count / 64))
            print(f"{name:20s} count {count:6d}: {ns:6.2f} ns per 64 lanes")
            if count == 16384 and op < 2:
                slowest = max(slowest, ns)
    ns = best_ms(bench, stream, x, REGISTER, 50, 0, 0, 0, 1) * 1e6 / (50 * 256)
    print(f"register loop, two loads, Add and a store: {ns:.2f} ns per 64 lanes")
    worst = float("inf")
    for m, n, k in ((128, 128, 128), (64, 256, 128), (16, 128, 256)):
        rounds = 60
        gflops = 2 * m * n * k * rounds / (best_ms(bench, stream, x, CUBE, rounds, m, n, k, 1) * 1e6)
        print(f"Mmad bf16 {m} x {n} x {k}: {gflops:.1f} GFLOP/s")
        if m >= 64:
            worst = min(worst, gflops)
    met = launch <= TARGETS["launch_ms"] and worst >= TARGETS["cube_gflops"] and slowest <= TARGETS["vector_ns"]
    print("targets met" if met else "targets missed")
    return 0 if met else 2


if __name__ == "__main__":
    sys.exit(main())
