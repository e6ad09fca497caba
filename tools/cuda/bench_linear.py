"""Times the dense projections of V4.1 on a GPU: fp8_32 activations times FP8 weights of 32 x 32 blocks, and BF16 ones.

    python tools/cuda/bench_linear.py --library backends/cuda/deepinfer_cuda/libdeepinfer_cuda.so --json report.json

Each figure is the median over replays of a CUDA graph of many calls that go round weights and activations larger than the
L2 together, random data. Beside it, in the same run: torch's tensorwise FP8 product of the same size (`torch._scaled_mm`, the
better of both accumulations; `torch.mm` beside BF16 ones), a copy and a BF16 product as ceilings. One call of each size is first
held against float64. With --seconds, sizes that have not begun by then are left out, and named. The report is stored after every
size.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

START = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/cuda", ".", "hal", "backends/cuda", "backends/triton")]

import torch  # noqa: E402
from deepinfer_cuda.native import WORKSPACE_BYTES  # noqa: E402
from deepinfer_hal import formats  # noqa: E402
from deepinfer_hal.c_abi import CLibrary  # noqa: E402
from deepinfer_hal.card import all_cards, sum_tolerance  # noqa: E402
from deepinfer_hal.weights import CanonicalWeight, WeightHandle  # noqa: E402
from gpu_state import state_while  # noqa: E402
from graph_timing import microseconds_of_a_call, require_gpu  # noqa: E402
from provenance import provenance  # noqa: E402
from report import store  # noqa: E402

SHAPES = {"wq_a": (0, 5120, 1280, 0), "wq_b": (0, 1280, 32768, 40), "wo_b": (0, 8192, 5120, 40), "wo_a": (8, 4096, 1024, 40)}
"""Role: groups (0: none), K, N and calls of a decode step of all layers. wq_a is timed by itself; the model has it in attn_in."""

LAYER_SHAPES = {
    "attn_in": (0, 5120, 1792, 40),
    "shared_gate_up": (0, 5120, 4608, 40),
    "shared_down": (0, 2304, 5120, 40),
    "indexer_wq_b": (0, 1280, 4096, 8),
    "draft_wkv": (0, 5120, 512, 3),
    "engram_wkv": (0, 6144, 25600, 2),
    "main_proj": (0, 15360, 5120, 1),
}
"""The other projections of fp8_32 rows."""

DENSE_SHAPES = {
    "head": (0, 5120, 129280, 1),
    "router": (0, 5120, 384, 40),
    "compressor": (0, 5120, 512, 7),
    "indexer_weights": (0, 5120, 32, 8),
    "indexer_wk": (0, 512, 128, 4),
}
"""BF16 rows and weights, float32 results."""

ALL_SHAPES = {**SHAPES, **LAYER_SHAPES, **DENSE_SHAPES}
LEAST_START_US, LEAST_TB_PER_S = 2.0, 4.2
"""What a call takes at least: a launch, and its bytes from memory."""

ROTATED_BYTES = 240 << 20
MOST_SETS = 256
GRAPH_US = 3000.0
REPLAYS = 9
BOUND_BY_PRODUCTS = 4096
"""Rows from which on the products bound a call, and the board's power the products."""


@dataclass
class Row:
    """One size: microseconds of a call, TFLOP/s, weight bytes per second, torch's microseconds and the ratio to it; what the call
    takes at least and how often a decode step makes it;
    kernels: each symbol that a call starts, with the microseconds it takes by itself; state: of the GPU in replays of calls that
    its products bound, as gpu_state has it."""

    shape: str
    rows: int
    us: float
    tflops: float
    tb_per_s: float
    torch_us: float | None
    ratio: float | None
    least_us: float
    calls: int
    kernels: dict[str, float]
    state: dict[str, float] = field(default_factory=dict)


def timed(calls: list[Callable[[], None]], guess_us: float) -> float:
    """Median microseconds of a call, over replays of a graph that goes round `calls`."""
    rounds = max(1, int(GRAPH_US / guess_us) // len(calls))
    return microseconds_of_a_call(calls * rounds, REPLAYS, discarded=1)


def kernels_of(call: Callable[[], None]) -> dict[str, float]:
    """The kernels of a call by symbol, with the median microseconds of each outside a graph."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as told:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in told.events():
        if event.device_type == DeviceType.CUDA:
            spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name: statistics.median(found) for name, found in spent.items()}


def ceilings() -> dict[str, float]:
    """TB/s of a copy (read and write) and TFLOP/s of BF16 and FP8 products of 8192^3."""
    big = torch.randint(0, 255, (512 << 20,), dtype=torch.uint8, device="cuda")
    to = torch.empty_like(big)
    copied = timed([lambda: torch.add(big.view(torch.int32), 1, out=to.view(torch.int32))], 300)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product = timed([lambda: torch.mm(a, b, out=out)], 1500)
    return {"copy_tb_per_s": 2 * big.numel() / copied / 1e6, "bf16_tflops": 2 * 8192**3 / product / 1e6}


class Problem:
    """Random operands of one shape, rotated."""

    def __init__(self, shape: str, rows: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.dense = shape in DENSE_SHAPES
        self.groups, self.k, self.n, self.calls_a_step = ALL_SHAPES[shape]
        self.matrices, self.rows = max(1, self.groups), rows
        weight_bytes = self.matrices * self.n * self.k * (2 if self.dense else 1)
        self.row_bytes = rows * self.matrices * (2 * self.k + 4 * self.n if self.dense else self.k + 2 * self.n)
        self.sets = min(MOST_SETS, max(2, -(-ROTATED_BYTES // (weight_bytes + self.row_bytes))))
        self.weights = [self._weight() for _ in range(self.sets)]
        drawn = torch.randn(self.sets, rows, self.matrices * self.k, device="cuda")
        self.rows_of = [(one.bfloat16(), None) if self.dense else formats.quantise(one, "fp8_32") for one in drawn]
        kind, shape_of = torch.float32 if self.dense else torch.bfloat16, (rows, self.matrices * self.n)
        self.out = [torch.full(shape_of, float("nan"), dtype=kind, device="cuda") for _ in range(self.sets)]

    def _weight(self) -> WeightHandle:
        lead = (self.groups,) if self.groups else ()
        drawn = torch.randn(self.matrices * self.n, self.k, device="cuda") * self.k**-0.5
        if self.dense:
            return WeightHandle("bench", CanonicalWeight("bf16", drawn.bfloat16()))
        values, scales = formats.quantise_weight_fp8(drawn)
        return WeightHandle(
            "bench", CanonicalWeight("fp8_block32", values.view(*lead, self.n, self.k), scales.view(*lead, self.n // 32, -1))
        )

    def calls(self, library: CLibrary) -> list[Callable[[], None]]:
        op = library.bind(all_cards()["grouped_linear" if self.groups else "linear"])
        return [
            lambda x=x, w=w, y=y: op(x[0], x[1], w, None, y, None)
            for x, w, y in zip(self.rows_of, self.weights, self.out, strict=True)
        ]

    def torch_calls(self, fast: bool) -> list[Callable[[], None]]:
        """torch's product with one scale a tensor; beside a grouped shape, one product of its weight bytes and FLOPs."""
        if self.dense:
            pairs = [(x[0], w.canonical().values.t()) for x, w in zip(self.rows_of, self.weights, strict=True)]
            return [lambda pair=pair: torch.mm(*pair, out_dtype=torch.float32) for pair in pairs]
        one = torch.ones((), device="cuda")
        made = []
        for (x, _), w in zip(self.rows_of, self.weights, strict=True):
            codes = x[:, : self.k].contiguous().view(torch.float8_e4m3fn)
            matrix = w.canonical().values.view(self.matrices * self.n, self.k).view(torch.float8_e4m3fn).t()
            made.append(lambda a=codes, b=matrix: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast))
        return made

    def check(self) -> None:
        """The first set's result against float64, at the card's tolerance."""
        x, scale = self.rows_of[0]
        x = (x if self.dense else formats.dequantise(x, scale, "fp8_32")).double().view(self.rows, self.matrices, self.k)
        w = self.weights[0].dequantise().double().view(self.matrices, self.n, self.k)
        wanted = torch.einsum("tgk,gnk->tgn", x, w).flatten(1)
        tolerance = sum_tolerance(self.out[0].dtype, self.k, float(x.abs().max() * w.abs().max()))
        error = (self.out[0].double() - wanted).abs()
        outside = int((~(error <= tolerance.atol + tolerance.rtol * wanted.abs())).sum())
        if outside:
            raise SystemExit(f"{outside} of {error.numel()} values are outside the card's tolerance")


def measure(library: CLibrary, shape: str, rows: int, with_torch: bool) -> Row:
    problem = Problem(shape, rows, seed=rows)
    flops = 2 * rows * problem.matrices * problem.n * problem.k
    guess = max(8.0, flops / 600e6)
    calls = problem.calls(library)
    calls[0]()
    problem.check()
    us = timed(calls, guess)
    theirs = min(timed(problem.torch_calls(fast), guess) for fast in (True, False)) if with_torch else None
    weight_bytes = problem.weights[0].nbytes
    ratio = us / theirs if theirs else None
    state = state_while(lambda: [call() for call in calls]) if rows >= BOUND_BY_PRODUCTS else {}
    least = LEAST_START_US + (weight_bytes + problem.row_bytes) / LEAST_TB_PER_S / 1e6
    rates = flops / us / 1e6, weight_bytes / us / 1e6
    return Row(shape, rows, us, *rates, theirs, ratio, least, problem.calls_a_step, kernels_of(calls[0]), state)


def measured(library: CLibrary, sizes: list[tuple[str, int]], with_torch: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """The result so far, as plain values, after each of the sizes (shape, rows)."""
    device = {"name": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    result: dict[str, Any] = {"device": device, "ceilings": ceilings(), "replays": REPLAYS, "left_out": [], "rows": []}
    for shape, rows in sizes:
        if time.monotonic() - START > seconds:
            result["left_out"].append(f"{shape} {rows} rows")
        else:
            torch.cuda.empty_cache()
            result["rows"].append(asdict(measure(library, shape, rows, with_torch)))
        yield result


def shown(row: dict[str, Any]) -> str:
    """A size's figures as a line."""
    line = "{shape} {rows:5d} rows  {us:7.1f} us  {tflops:6.1f} TFLOP/s  {tb_per_s:5.2f} TB/s".format(**row)
    line += "  at least {least_us:5.1f} us, {calls:2d} a step".format(**row)
    return line if row["ratio"] is None else line + "  torch {torch_us:7.1f} us, ratio {ratio:.2f}".format(**row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 4096])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=[*ALL_SHAPES])
    parser.add_argument("--no-torch", action="store_true", help="the library alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further size is begun")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpu()
    room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    library = CLibrary(
        args.library.resolve(), lambda: torch.cuda.current_stream().cuda_stream, workspace=(room.data_ptr(), room.numel())
    )
    sizes, told = [(shape, rows) for rows in args.rows for shape in args.shapes], 0
    ops = {"grouped_linear" if ALL_SHAPES[shape][0] else "linear" for shape in args.shapes}
    made_of = provenance({op: f"di_{op}" for op in ops}, args.library.resolve())
    for result in measured(library, sizes, not args.no_torch, args.seconds):
        for row in result["rows"][told:]:
            print(shown(row), flush=True)
        told = len(result["rows"])
        if args.json:
            store(args.json, shlex.join(["python", *sys.argv]), made_of | result)
    print(", ".join(f"{name} {value:.2f}" for name, value in result["ceilings"].items()))
    if result["left_out"]:
        print(f"left out after {args.seconds} s: {', '.join(result['left_out'])}")


if __name__ == "__main__":
    main()
