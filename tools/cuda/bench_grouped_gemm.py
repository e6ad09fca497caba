"""Times the expert products of V4.1-Flash with FP4 weights on one GPU, beside the ceilings of the same run.

    python tools/cuda/bench_grouped_gemm.py                        every shape
    python tools/cuda/bench_grouped_gemm.py --experts 16 --report reports/h200/grouped_gemm.json

Gate + up is K = 5120, N = 4608, down K = 2304, N = 5120; experts have equal numbers of rows (4 to 1024), or what random or
Zipf routing of 6 among 384 gives 8, 64 and 256 rows. Six experts are what a rank of 64 has, with 8 to 4096 rows in its steps;
three are a draft block's. Rows are fp8_32 codes. Each time is the median of replays of a graph of several calls, over weights
that exceed the last-level cache (up to 16 experts: some sets in turn). TB/s counts the bytes of codes and scales of the experts
that have rows. Before a shape is timed, every kind of row it has is checked against float64 products at the card's tolerance.
Ceilings are an addition over 4 GiB and a BF16 product of 8192^3, and a point's floor is the longer of its weights' bytes at the
one and its products at the other. torch's own ops, beside every point, are `torch._grouped_mm` with BF16 weights, four times the
bytes, and `torch._scaled_grouped_mm` with e4m3 weights and rows that have one scale a row, twice the bytes and other numbers;
they come last, since they heat the chip. The report is stored after every point.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/cuda", ".", "hal", "backends/cuda", "backends/triton")]

import torch  # noqa: E402
from deepinfer_cuda import native, native_library, weights  # noqa: E402
from deepinfer_hal.card import get_card, sum_tolerance  # noqa: E402
from deepinfer_hal.errors import BackendUnavailable  # noqa: E402
from deepinfer_hal.formats import dequantise  # noqa: E402
from graph_timing import microseconds_of_a_call, require_gpu  # noqa: E402
from provenance import provenance  # noqa: E402
from report import store  # noqa: E402

GATE_UP, DOWN, EXPERTS, TOP_K = (4608, 5120), (5120, 2304), 384, 6
BARS = {4: 3.0, 8: 3.0, 16: 3.0, 32: 3.0, 64: 2.2}
"""TB/s asked for at a number of rows an expert, gate + up; the down shape at 0.9 of it."""
FEW_ROWS = {3: (40, 320), 6: (8, 32, 64, 256)}
"""Rows an expert of the few experts of a rank of 64, in its draft blocks and in its decode and verify steps; no bar is set."""
MANY_ROWS = {6: (1024, 4096), 16: (1024,), 48: (1024,), 384: (1024,)}
"""Rows an expert where products take longest: in prefill steps of a rank of 64, and where a bar is set."""


def random_weight(experts: int, shape: tuple[int, int], gen: torch.Generator) -> weights.FragmentWeight:
    """Random codes with scales of 2^-15 to 2^-4, in fragments."""
    packed = torch.empty((*weights.blocks((experts, *shape)), weights.BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    packed.random_(0, 256, generator=gen)
    packed[..., weights.CODE_BYTES :].random_(238, 250, generator=gen)
    return weights.FragmentWeight("experts_gate_up", (experts, *shape), packed)


def random_rows(rows: int, width: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8_32 codes without NaN, and scales around one."""
    codes = torch.randint(0, 127, (rows, width), dtype=torch.uint8, device="cuda", generator=gen)
    signs = torch.randint(0, 2, (rows, width), dtype=torch.uint8, device="cuda", generator=gen)
    return codes + 128 * signs, torch.randint(110, 120, (rows, width // 32), dtype=torch.uint8, device="cuda", generator=gen)


def routed(rows: int, exponent: float) -> list[int]:
    """Rows of each of 384 experts when every token takes 6 different ones, drawn with weights rank^-exponent."""
    gen = torch.Generator().manual_seed(rows)
    share = torch.arange(1, EXPERTS + 1, dtype=torch.float64) ** -exponent
    share = share[torch.randperm(EXPERTS, generator=gen)]
    chosen = torch.multinomial((share / share.sum()).expand(rows, EXPERTS), TOP_K, replacement=False, generator=gen)
    return torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()


def fault(weight: weights.FragmentWeight, rows: tuple[torch.Tensor, torch.Tensor], bounds: list[int], out: torch.Tensor) -> str:
    """What is wrong with the rows of the experts with fewest and most rows and of the last one; empty if nothing is."""
    counts = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    used = sorted((count, expert) for expert, count in enumerate(counts) if count)
    for expert in {used[0][1], used[-1][1], max(expert for _, expert in used)}:
        some = slice(bounds[expert], bounds[expert + 1])
        x, matrix = dequantise(rows[0][some], rows[1][some], "fp8_32").double(), weight.slot(expert).dequantise().double()
        allowed = sum_tolerance(out.dtype, x.shape[1], float(x.abs().max() * matrix.abs().max()))
        wanted = x @ matrix.T
        error = (out[some].double() - wanted).abs() - allowed.rtol * wanted.abs()
        if not bool((error <= allowed.atol).all()):
            return f"expert {expert} ({counts[expert]} rows) is off by {float(error.max()):.3g}"
    return ""


def measured(
    call: Callable[..., None], sets: list[weights.FragmentWeight], counts: list[int], gen: torch.Generator, samples: int
) -> dict:
    """One point: the time of a call and what it moves and computes."""
    experts, features, width = sets[0].shape
    rows, active = sum(counts), sum(1 for count in counts if count)
    bounds = [0, *torch.tensor(counts).cumsum(0).tolist()]
    offsets = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    xs = [random_rows(rows, width, gen) for _ in range(2)]
    outs = [torch.full((rows, features), math.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def one(index: int) -> Callable[[], None]:
        return lambda: call(*xs[index % 2], sets[index % len(sets)], offsets, outs[index % 2], None)

    one(0)()
    wrong = fault(sets[0], xs[0], bounds, outs[0])
    each = active * sets[0].nbytes / experts / 3e12 + 2 * rows * features * width / 600e12
    us = microseconds_of_a_call([one(index) for index in range(2 * max(1, min(8, int(2e-3 / each))))], samples, discarded=2)
    moved = active * sets[0].nbytes // experts
    return {
        "experts": experts, "N": features, "K": width, "rows": rows, "active": active, "us": us, "weight_bytes": moved,
        "tb_per_s": moved / us * 1e-6, "tflop_per_s": 2 * rows * features * width / us * 1e-6, "wrong": wrong,
    }  # fmt: skip


def torch_us(call: Callable[[], torch.Tensor], flops: float, samples: int) -> float | None:
    """Microseconds of an operator of torch; None where this torch has none that runs here."""
    try:
        return microseconds_of_a_call([call] * (2 if flops > 1e12 else 8), samples, discarded=2)
    except (AttributeError, RuntimeError, ValueError) as error:
        print(f"torch: {str(error).splitlines()[0]}")
        return None


def time_torch(found: list[tuple[dict[str, Any], list[int]]], samples: int) -> Iterator[None]:
    """Adds the times of torch's grouped products of the same sizes to each point, with the rows of its experts; a pause after
    each."""
    gen, weight, codes = torch.Generator("cuda").manual_seed(8), torch.empty(0), torch.empty(0)
    for point, counts in found:
        shape = (point["experts"], point["N"], point["K"])
        if weight.shape != shape:
            del weight, codes
            weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=gen)
            codes = weight.to(torch.float8_e4m3fn)
        x = torch.randn((sum(counts), shape[2]), dtype=torch.bfloat16, device="cuda", generator=gen)
        x_codes, ends = x.to(torch.float8_e4m3fn), torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        of_rows, of_features = torch.ones(sum(counts), device="cuda"), torch.ones(shape[:2], device="cuda")

        def product(x: torch.Tensor = x, w: torch.Tensor = weight, ends: torch.Tensor = ends) -> torch.Tensor:
            return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)

        def scaled(x: Any = x_codes, w: Any = codes, by: Any = (of_rows, of_features), ends: Any = ends) -> torch.Tensor:
            return torch._scaled_grouped_mm(x, w.transpose(1, 2), *by, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)

        flops = 2.0 * sum(counts) * shape[1] * shape[2]
        point["torch_grouped_mm_us"] = torch_us(product, flops, samples)
        point["torch_scaled_grouped_mm_us"] = torch_us(scaled, flops, samples)
        yield


def ceilings(samples: int) -> dict[str, float]:
    """Bytes per second of an addition over 4 GiB and FLOPs per second of a BF16 product of 8192^3, in tera."""
    large = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    square = torch.randn((8192, 8192), device="cuda").to(torch.bfloat16)
    other = torch.randn((8192, 8192), device="cuda").to(torch.bfloat16)
    copy = microseconds_of_a_call([lambda: large.add_(1)] * 2, samples, discarded=2)
    product = microseconds_of_a_call([lambda: torch.mm(square, other)] * 4, samples, discarded=2)
    return {"copy_tb_per_s": 2 * large.nbytes / copy * 1e-6, "bf16_tflop_per_s": 2 * 8192**3 / product * 1e-6}


def points(experts: list[int], samples: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """One after another, each as plain values, with the rows of its experts."""
    gen = torch.Generator("cuda").manual_seed(7)
    call = native.library(torch.device("cuda", 0)).bind(get_card("grouped_gemm"))
    for name, shape, share in (("gate + up", GATE_UP, 1.0), ("down", DOWN, 0.9)):
        for count in experts:
            sets = [random_weight(count, shape, gen) for _ in range(4 if count <= 8 else 2 if count <= 16 else 1)]
            for rows in FEW_ROWS.get(count, BARS):
                point = measured(call, sets, [rows] * count, gen, samples)
                bar = "none" if count in FEW_ROWS else f"{BARS[rows] * share:.2f} TB/s"
                yield {"name": f"{name}, {rows} rows", **point, "bar": bar}, [rows] * count
            if count == EXPERTS and shape == GATE_UP:
                for kind, exponent in (("uniform", 0.0), ("Zipf", 1.0)):
                    for rows in (8, 64, 256):
                        counts = routed(rows, exponent)
                        point = measured(call, sets, counts, gen, samples)
                        yield {"name": f"{kind} routing, {rows} rows", **point, "bar": "2.80 TB/s"}, counts
            del sets
    for name, shape, share in (("gate + up", GATE_UP, 1.0), ("down", DOWN, 0.9)):  # last: they heat the chip
        for count, rows in ((some, rows) for some in experts for rows in MANY_ROWS.get(some, ())):
            point = measured(call, [random_weight(count, shape, gen)], [rows] * count, gen, samples)
            bar = "none" if count in FEW_ROWS else f"{500 * share:.0f} TFLOP/s"
            yield {"name": f"{name}, {rows} rows", **point, "bar": bar}, [rows] * count


def measure(experts: list[int], samples: int) -> Iterator[dict[str, Any]]:
    """The result so far, as plain values, after each point; then with the ceilings, and with torch's time of each point."""
    found: list[dict[str, Any]] = []
    rows_of: list[list[int]] = []
    made_of = {"symbol": "di_grouped_gemm", **provenance(), **library_facts()}
    result = {"gpu": torch.cuda.get_device_name(), **made_of, "points": found}
    for point, counts in points(experts, samples):
        found.append(shown(point))
        rows_of.append(counts)
        yield result
    kinds = ("uniform", "Zipf") if EXPERTS in experts else ()
    skew = [points_of(found, f"{kind} routing, 256 rows")["tb_per_s"] for kind in kinds]
    most = ceilings(samples)
    for point in found:
        point["floor_us"] = floor(point, most)
    result |= {**most, "zipf_over_uniform": skew[0] / skew[1] if skew else None}
    yield result
    for _ in time_torch(list(zip(found, rows_of, strict=True)), samples):
        yield result


def floor(point: dict[str, Any], most: dict[str, float]) -> float:
    """Microseconds that a point's bytes of weights, or its products in BF16, take at the ceilings."""
    flops = 2 * point["rows"] * point["N"] * point["K"]
    return 1e-6 * max(point["weight_bytes"] / most["copy_tb_per_s"], flops / most["bf16_tflop_per_s"])


def library_facts() -> dict[str, Any]:
    """Digest of the library's sources and its kernels of this op, by symbol; nothing where its description is not beside it."""
    try:
        told = native_library.description()
    except BackendUnavailable as error:
        print(error)
        return {"sources": None, "kernels": None}
    kernels = {name: kernel for name, kernel in told["kernels"].items() if "grouped_gemm" in name or "expand_rows" in name}
    return {"sources": told["sources"], "kernels": kernels}


def points_of(points: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The point of a name."""
    return next(point for point in points if point["name"] == name)


def shown(point: dict[str, Any]) -> dict[str, Any]:
    """The point, printed."""
    figures = "{us:9.1f} us {tb_per_s:5.2f} TB/s {tflop_per_s:6.1f} TFLOP/s, bar {bar} {wrong}"
    print(("{name:26s} E {experts:3d} ({active:3d} active) " + figures).format(**point), flush=True)
    return point


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="*", default=[3, 6, 16, 48, 384], help="numbers of experts")
    parser.add_argument("--samples", type=int, default=9, help="replays of which the median is taken")
    parser.add_argument("--report", type=Path, help="where to store the JSON")
    options = parser.parse_args(arguments)
    require_gpu()
    for result in measure(options.experts, options.samples):
        if options.report:
            store(options.report, shlex.join(["python", "tools/cuda/bench_grouped_gemm.py", *arguments]), result)
    for point in result["points"]:
        own = (point[f"torch_{name}_us"] for name in ("grouped_mm", "scaled_grouped_mm"))
        line = "{name:26s} E {experts:3d} {us:9.1f} us, floor {floor_us:9.1f}, torch in BF16 and in e4m3 ".format(**point)
        print(line + ", ".join("none" if us is None else f"{us:.1f}" for us in own))
    if result["zipf_over_uniform"]:
        print("Zipf routing over uniform at equal bytes, 256 rows: {zipf_over_uniform:.2f}, bar 1.15".format(**result))
    print("copy {copy_tb_per_s:.2f} TB/s, BF16 {bf16_tflop_per_s:.0f} TFLOP/s".format(**result))
    return 1 if any(point["wrong"] for point in result["points"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
