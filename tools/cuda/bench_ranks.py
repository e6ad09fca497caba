"""Times the expert exchange between GPUs: ep_dispatch of fp8_32 rows and ep_combine of BF16 rows at V4.1-Flash's width.

    python tools/cuda/bench_ranks.py --report reports/h200/ranks.json
    python tools/cuda/bench_ranks.py --world 4 --tokens 64

Every rank is a process with a GPU of its own; each has as many tokens, which choose 6 of 384 experts at random. A time is the
median over replays of a CUDA graph that rotates over sets of buffers, on the slowest rank: so it has the meeting of the ranks
in it, which `0 tokens` shows alone. `eager` is the wall time of a call that waits for its status, `reference` that of the card's
reference over NCCL. GB/s are of the bytes that a rank receives from the others; the ceilings are copies between two of
the GPUs, measured before. The outputs of every set are checked first: rows bit for bit, sums against float64.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/cuda", ".", "hal", "backends/cuda", "backends/triton")]

import torch  # noqa: E402
from deepinfer_cuda.backend import CudaBackend  # noqa: E402
from deepinfer_hal import formats  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.conformance.rank_process import Rank  # noqa: E402
from deepinfer_hal.conformance.ranks import RankProcesses, Seat  # noqa: E402
from graph_timing import microseconds_of_a_call  # noqa: E402
from provenance import provenance  # noqa: E402
from report import store  # noqa: E402

WIDTH, EXPERTS, CHOICES = 5120, 384, 6
ROW_BYTES, SCALE_BYTES, SUM_BYTES = WIDTH, WIDTH // 32, 2 * WIDTH
CACHE_BYTES, MOST_SETS = 128 << 20, 16
LINK_BYTES = 256 << 20


def one_set(rank: int, world: int, tokens: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Arguments of a dispatch and of the combine after it, with what all ranks send, made from seeds."""
    ids, rows, weights = [], [], []
    for other in range(world):
        gen = torch.Generator().manual_seed(1000 * seed + other)
        picks = [torch.randperm(EXPERTS, generator=gen)[:CHOICES] for _ in range(tokens)]
        ids.append(torch.stack(picks).int() if picks else torch.zeros(0, CHOICES, dtype=torch.int32))
        rows.append(formats.quantise(torch.randn(tokens, WIDTH, generator=gen), "fp8_32"))
        weights.append(torch.rand(tokens, CHOICES, generator=gen))
    room = max(1, world * tokens * CHOICES)
    new = {"offsets": (EXPERTS // world + 1,), "source": (room, 2), "inverse": (tokens, CHOICES, 2)}
    made = {name: torch.empty(shape, dtype=torch.int32, device=device) for name, shape in new.items()}
    made |= {"x": rows[rank][0].to(device), "x_scale": rows[rank][1].to(device), "ids": ids[rank].to(device)}
    made |= {"weights": weights[rank].to(device), "out_weights": torch.empty(room, device=device)}
    made["out"] = torch.empty(room, WIDTH, dtype=torch.uint8, device=device)
    made["out_scale"] = torch.empty(room, WIDTH // 32, dtype=torch.uint8, device=device)
    made["rows"] = torch.randn(room, WIDTH, generator=torch.Generator(device).manual_seed(seed + rank), device=device).bfloat16()
    made["sums"] = torch.empty(tokens, WIDTH, dtype=torch.bfloat16, device=device)
    return {**made, "every": (ids, rows, weights)}


def dispatch(fn: Callable[..., None], comm: Any, s: dict[str, Any]) -> None:
    fn(comm, s["x"], s["x_scale"], s["ids"], s["weights"], EXPERTS // comm.world_size, None, s["out"], s["out_scale"],
       s["out_weights"], s["offsets"], s["source"], s["inverse"])  # fmt: skip


def combine(fn: Callable[..., None], comm: Any, s: dict[str, Any]) -> None:
    fn(comm, s["rows"], s["offsets"][-1:], s["source"], s["inverse"], s["weights"], None, None, s["sums"])


def check(calls: dict[str, Callable[..., None]], comm: Any, s: dict[str, Any]) -> dict[str, int]:
    """Runs both on a set; ValueError names what is wrong. Returns the rows that came from other ranks, and went to them."""
    dispatch(calls["ep_dispatch"], comm, s)
    ids, rows, weights = s["every"]
    experts = EXPERTS // comm.world_size
    chosen = torch.cat([one.flatten() for one in ids])
    order = torch.argsort(chosen, stable=True)  # by expert, then rank, token and choice
    order = order[(chosen[order] // experts) == comm.rank]
    token, total = order // CHOICES, order.numel()
    for name, want in (("out", torch.cat([r for r, _ in rows])[token]), ("out_scale", torch.cat([r for _, r in rows])[token]),
                       ("out_weights", torch.cat(weights).flatten()[order])):  # fmt: skip
        if not torch.equal(s[name][:total].cpu(), want):
            raise ValueError(f"rank {comm.rank}: {name} of the dispatch is wrong")
    s["rows"][:total] = formats.dequantise(s["out"][:total], s["out_scale"][:total], "fp8_32").bfloat16()
    combine(calls["ep_combine"], comm, s)
    own = formats.dequantise(*rows[comm.rank], "fp8_32").bfloat16().double()
    want = own * weights[comm.rank].double().sum(1, keepdim=True)
    args = {"out": s["sums"], "inverse": s["inverse"], "rows": own.float()}
    allowed = get_card("ep_combine").tolerance(args, "out")
    if bool(((s["sums"].double().cpu() - want).abs() > allowed.atol + allowed.rtol * want.abs()).any()):
        raise ValueError(f"rank {comm.rank}: the sums are outside the card's tolerance")
    tokens = ids[0].shape[0]
    own_choices = ids[comm.rank].flatten() // experts
    return {"in": int((order // max(1, tokens * CHOICES) != comm.rank).sum()), "out": int((own_choices != comm.rank).sum())}


def measure(rank: Rank, tokens: list[int], samples: int) -> list[dict[str, Any]]:
    """A rank's times of each number of tokens. All ranks make the same calls."""
    kernels = {kernel.op: kernel for kernel in rank.backend.kernels(rank.index)}
    calls = {op: kernels[op].fn for op in ("ep_dispatch", "ep_combine")}
    told = []
    with rank.open() as comm:
        for count in tokens:
            size = comm.world_size * max(count, 1) * CHOICES * (ROW_BYTES + SUM_BYTES)
            sets = [one_set(comm.rank, comm.world_size, count, seed, rank.device) for seed in range(_sets(size))]
            moved = [check(calls, comm, s) for s in sets]
            row: dict[str, Any] = {"tokens": count, "sets": len(sets)}
            for name, part in (("dispatch", dispatch), ("combine", combine)):
                graph = [functools.partial(part, calls[f"ep_{name}"], comm, s) for s in sets]
                row[f"{name}_us"] = microseconds_of_a_call(graph, samples, 3)
                row[f"{name}_eager_us"] = _wall(graph)
                reference = functools.partial(part, get_card(f"ep_{name}").reference, comm, sets[0])
                row[f"{name}_reference_us"] = _wall([reference] * 5)
            row["dispatch_bytes"] = statistics.mean(one["in"] for one in moved) * (ROW_BYTES + SCALE_BYTES + 4)
            row["combine_bytes"] = statistics.mean(one["out"] for one in moved) * SUM_BYTES
            told.append({**row, "symbols": sorted(kernels[op].symbol for op in calls)})
    return told


def _sets(nbytes: int) -> int:
    return max(2, min(MOST_SETS, CACHE_BYTES // nbytes))


def _wall(calls: list[Callable[[], None]]) -> float:
    """Median wall time of a call that ends with the device idle, in microseconds."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def link() -> dict[str, float]:
    """GB/s of copies from GPU 0 to 1: of many bytes, and of as many as a dispatch of 64 tokens sends."""
    found = {}
    for name, nbytes in (("copy_gbs", LINK_BYTES), ("copy_1mb_gbs", 1 << 20)):
        here = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0") for _ in range(2)]
        there = [torch.empty(nbytes, dtype=torch.uint8, device="cuda:1") for _ in range(2)]
        copies = [lambda a=a, b=b: b.copy_(a, non_blocking=True) for a, b in zip(here, there, strict=True)]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for number in range(12):
            if number == 2:
                start.record()
            copies[number % 2]()
        end.record()
        end.synchronize()
        found[name] = round(10 * nbytes / (start.elapsed_time(end) * 1e-3) * 1e-9, 1)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--tokens", type=int, action="append", help="of each rank; default 0, 8, 64 and 256")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() < options.world:
        print(f"{options.world} ranks need as many GPUs; there are {torch.cuda.device_count()}")
        return 1
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "world": options.world}
    result |= provenance()
    result["link"] = link()
    print(f"{result['device']} x {options.world}: a copy between two goes at {result['link']['copy_gbs']} GB/s")
    params = {"tokens": options.tokens or [0, 8, 64, 256], "samples": options.samples}
    seats = [Seat.of(CudaBackend(), index) for index in range(options.world)]
    with RankProcesses(options.world) as ranks:
        answers = ranks.run("bench_ranks:measure", options.world, seats, deadline_s=30.0, limit_s=240.0, params=params)
    if wrong := [f"rank {rank} {answer}" for rank, answer in enumerate(answers) if not answer.ok]:
        print("\n".join(wrong))
        return 1
    result["rows"] = [_slowest(rows) for rows in zip(*(answer.value for answer in answers), strict=True)]
    for row in result["rows"]:
        print(_line(row))
    if options.report:
        store(options.report, shlex.join(["python", "tools/cuda/bench_ranks.py", *arguments]), result)
    return 0


def _slowest(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One row for all ranks: the longest of each time, the most of bytes, and GB/s of both."""
    row = {name: max(one[name] for one in rows) for name in rows[0]}
    row = {name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}
    for name in ("dispatch", "combine"):
        row[f"{name}_gbs"] = round(row[f"{name}_bytes"] / row[f"{name}_us"] * 1e-3, 1)
    return row


def _line(row: dict[str, Any]) -> str:
    parts = [
        f"{name} {row[f'{name}_us']} us, {row[f'{name}_gbs']} GB/s "
        f"(eager {row[f'{name}_eager_us']}, reference {row[f'{name}_reference_us']})" for name in ("dispatch", "combine")
    ]  # fmt: skip
    return f"{row['tokens']:>4} tokens a rank: {'; '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
