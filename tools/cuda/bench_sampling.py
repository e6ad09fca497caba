"""Times sampling, verification, drafting and the state ops at V4.1-Flash's shapes, on one GPU.

    python tools/cuda/bench_sampling.py                                   64 rows of 129 280 logits
    python tools/cuda/bench_sampling.py --only sample --report reports/h200/sampling.json

Logits are a broad floor under 300 likely tokens a row, as a model's are; "flat" rows are normal numbers with a deviation of 3,
of which thousands survive top-p. One CUDA graph holds a call on each of several buffers, together larger than the last-level
cache. Outputs are checked against the cards' float64 references before anything is timed. floor_us is the larger of what a
launch costs inside a graph and the card's bytes over the copy rate, both measured in the same run; torch_us is what torch has of
an op (torch_ops.py), over such buffers, after all kernels, since it heats the chip. With --seconds, calls that have not begun by
then are left out, and named. The report is stored after every call.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/cuda", ".", "hal", "backends/cuda", "backends/triton")]

import torch  # noqa: E402
from bench_layer_small import Offered, ceilings, check, kernel_of, offered  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.row_layout import block_bytes  # noqa: E402
from deepinfer_hal.weights import CanonicalWeight, prepare_canonical  # noqa: E402
from graph_timing import microseconds, require_gpu  # noqa: E402
from provenance import provenance  # noqa: E402
from report import store  # noqa: E402
from torch_ops import beside, torch_row, torchs_own  # noqa: E402

VOCAB, H, STREAMS, HEADS, D, RANK, BLOCK, WINDOW, RING = 129280, 5120, 4, 64, 512, 256, 5, 128, 136
BF16, F32, U8, I32, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int32, torch.int64
CACHE_BYTES, MOST_BUFFERS = 150 << 20, 12

Call = tuple[str, str, tuple[Any, ...]]


class Values:
    """Random arguments on the GPU, from one stored seed."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.gen = rows, torch.Generator("cuda").manual_seed(seed)

    def ints(self, high: int, *shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
        return torch.randint(0, high, shape or (self.rows,), generator=self.gen, device="cuda", dtype=dtype)

    def normal(self, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.gen, device="cuda") * scale).to(dtype)

    def full(self, value: float, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.full((self.rows,), value, device="cuda", dtype=dtype)

    def order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.gen, device="cuda").int()

    def logits(self, flat: bool = False) -> torch.Tensor:
        if flat:
            return self.normal(self.rows, VOCAB, scale=3.0)
        likely = 4 + 12 * torch.rand(self.rows, 300, generator=self.gen, device="cuda")
        return self.normal(self.rows, VOCAB, scale=1.7).scatter_(1, self.ints(VOCAB, self.rows, 300, dtype=I64), likely)


def empty(*shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=dtype)


def sampling(v: Values) -> Iterator[Call]:
    settings = {
        "greedy": (0.0, 0, 1.0, 0.0, False), "plain": (1.0, 0, 1.0, 0.0, False), "top-p 0.95": (1.0, 0, 0.95, 0.0, False),
        "top-k 50": (1.0, 50, 1.0, 0.0, False), "top-k 50, top-p 0.95, min-p 0.05": (0.8, 50, 0.95, 0.05, False),
        "plain, flat": (1.0, 0, 1.0, 0.0, True), "top-p 0.95, flat": (1.0, 0, 0.95, 0.0, True),
        "top-k 20000, flat": (1.0, 20000, 1.0, 0.0, True),
    }  # fmt: skip
    for name, (temperature, top_k, top_p, min_p, flat) in settings.items():
        filters = (v.full(temperature), v.full(top_k, I32), v.full(top_p), v.full(min_p))
        draws = (v.ints(1 << 62, v.rows, dtype=I64), v.ints(1 << 20), 0, empty(v.rows))
        yield f"sample {name}", "sample", (v.logits(flat), *filters, *draws)
    yield "nan_row_flags", "nan_row_flags", (v.logits(), empty(v.rows, dtype=U8))
    best = (v.full(0.0), empty(v.rows), empty(v.rows, 20), empty(v.rows, 20, dtype=F32))
    yield "top_logprobs 20", "top_logprobs", (v.logits(), v.ints(VOCAB), *best)
    no_bias = (empty(v.rows + 1), empty(0), empty(0, dtype=F32))
    history = (v.ints(VOCAB, v.rows, 4096), v.order(v.rows), v.full(2048, I32), v.full(4096, I32))
    penalties = (v.full(1.2), v.full(0.5), v.full(0.1))
    yield "mask_logits penalties over 4096 tokens", "mask_logits", (*history, *penalties, *no_bias, None, v.logits())
    mask = torch.randint(-(2**31), 2**31, (v.rows, VOCAB // 32), generator=v.gen, device="cuda").int()
    off = (v.full(1.0), v.full(0.0), v.full(0.0))
    yield "mask_logits allowed tokens", "mask_logits", (*history, *off, *no_bias, mask, v.logits())


def verification(v: Values) -> Iterator[Call]:
    target, drafts = v.ints(VOCAB, v.rows, BLOCK + 1), v.ints(VOCAB, v.rows, BLOCK)
    drafts[:, :3] = target[:, :3]
    near = v.normal(v.rows, BLOCK + 1, VOCAB, scale=2.0)
    both = (near, near[:, :BLOCK] + v.normal(v.rows, BLOCK, VOCAB, scale=0.3))
    for rule, given in (("coupled", (None, None)), ("rejection", both)):
        draws = (v.ints(1 << 62, v.rows, dtype=I64), v.ints(1 << 20))
        yield f"verify_drafts {rule}", "verify_drafts", (
            target, drafts, v.full(BLOCK, I32), *given, *draws, rule, empty(v.rows), empty(v.rows, BLOCK + 1),
        )  # fmt: skip
    chances = torch.rand(v.rows, BLOCK, generator=v.gen, device="cuda")
    cost = 1 + torch.rand(v.rows * (BLOCK + 1) + 1, generator=v.gen, device="cuda").cumsum(0)
    yield "plan_verify_lengths", "plan_verify_lengths", (chances, cost, v.rows, empty(v.rows))


def drafting(v: Values) -> Iterator[Call]:
    features = empty(v.rows, 3 * H, dtype=BF16)[:, :H]
    yield "draft_features", "draft_features", (v.normal(v.rows, STREAMS, H, dtype=BF16), None, features)
    tables = [prepare_canonical("markov", CanonicalWeight("bf16", v.normal(VOCAB, RANK, dtype=BF16, scale=0.3))) for _ in "eh"]
    out = (empty(v.rows, VOCAB, dtype=F32), empty(v.rows, RANK, dtype=BF16))
    yield "markov_logits", "markov_logits", (v.normal(v.rows, VOCAB), v.ints(VOCAB), *tables, *out)
    joined = (v.normal(v.rows, H, dtype=BF16), v.normal(v.rows, RANK, dtype=BF16), v.normal(1, H + RANK, dtype=BF16, scale=0.1))
    yield "confidence_head", "confidence_head", (*joined, 1.5, v.full(0.0), v.full(0.0))
    width, request = block_bytes("fp8_32", D, 1), torch.arange(v.rows, device="cuda", dtype=I32)
    stores = [v.ints(0x38, v.rows * many, width, dtype=U8) for many in (RING, BLOCK)]
    for codes in stores:
        codes[:, D:] = 127
    place = (request * RING, request * 0, request * 0 + RING)
    q = v.normal(v.rows * BLOCK, HEADS, D, dtype=BF16)
    tail = (v.normal(HEADS), D**-0.5, WINDOW, None, torch.zeros_like(q))
    yield "draft_attention", "draft_attention", (q, stores[0], *place, "fp8_32", request + 4096, stores[1], BLOCK, *tail)


def state(v: Values) -> Iterator[Call]:
    history, positions = v.ints(VOCAB, v.rows, 131072), v.ints(131072)
    yield "advance_step", "advance_step", (v.ints(VOCAB), v.order(v.rows), positions, history)
    rows = (torch.arange(v.rows, device="cuda", dtype=I32), positions)
    yield "gather_tokens", "gather_tokens", (history, v.order(v.rows), *rows, None, empty(v.rows), empty(v.rows, 4))
    window, order = v.ints(256, 8192, block_bytes("fp8_32", D, 1), dtype=U8), v.order(8192)
    pairs = (order[: v.rows].clone(), order[-v.rows :].clone())
    yield "copy_rows window rows", "copy_rows", (window, *pairs, torch.zeros_like(window))
    for op, pairs, row_bytes in (("copy_blocks", 256, block_bytes("fp4_16", D, 64)), ("snapshot_state", 8, 43 * RING * 528)):
        order = v.order(2 * pairs)
        yield f"{op} {pairs}", op, (order[:pairs], order[pairs:], v.ints(256, 2 * pairs, row_bytes, dtype=U8))


def calls(rows: int, seed: int, only: str) -> Iterator[Call]:
    """One buffer's calls, made when their turn comes."""
    v = Values(rows, seed)
    made = (call for group in (sampling, drafting, verification, state) for call in group(v))
    return (call for call in made if call[0].startswith(only))


def rotated(args: tuple[Any, ...], nbytes: int) -> list[tuple[Any, ...]]:
    """The arguments and copies of them, of a call that moves so many bytes."""
    copies = range(min(MOST_BUFFERS, CACHE_BYTES // max(nbytes, 1)))
    return [args] + [tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in args) for _ in copies]


def measure(rows: int, samples: int, only: str, seconds: float, kernels: Offered) -> Iterator[dict[str, Any]]:
    """The result so far, as plain values, after each call."""
    launch_us, rate = ceilings(samples)
    result = {"gpu": torch.cuda.get_device_name(), "rows": rows, "launch_us": launch_us, "copy_bytes_per_second": rate}
    result |= {**provenance(), "wrong": [], "left_out": [], "ops": []}
    for name, op, args in calls(rows, 0, only):
        if time.monotonic() - START > seconds:
            result["left_out"].append(name)
            continue
        kernel = kernel_of(kernels, op, args)
        problem = check(name, op, kernel.fn, args)
        result["wrong"] += [problem] if problem else []
        nbytes = get_card(op).cost(get_card(op).bind_args(args, {})).bytes
        buffers = rotated(args, nbytes)

        def run(fn: Any = kernel.fn, buffers: Any = buffers) -> None:
            for one in buffers:
                fn(*one)

        spent = microseconds(run, samples) / len(buffers)
        floor = max(launch_us, nbytes / rate * 1e6)
        del buffers, run
        result["ops"].append({"name": name, "op": op, "symbol": kernel.symbol, "bytes": nbytes, "us": spent, "floor_us": floor})
        yield result
    for name, op, args in calls(rows, 0, only):
        row = next((row for row in result["ops"] if row["name"] == name), None)
        if row is None or time.monotonic() - START > seconds:
            result["left_out"].append(f"torch beside {name}")
            continue
        row |= torch_row([torchs_own(op, get_card(op).bind_args(one, {})) for one in rotated(args, row["bytes"])], samples)
        yield result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows of logits, and requests")
    parser.add_argument("--samples", type=int, default=10, help="of which the median is taken")
    parser.add_argument("--only", default="", help="calls whose name begins so")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further call is begun")
    parser.add_argument("--provider", help="kernels of this provider alone")
    parser.add_argument("--report", type=Path, help="where to store the JSON")
    options = parser.parse_args(arguments)
    require_gpu()
    command, result, shown = shlex.join(["python", "tools/cuda/bench_sampling.py", *arguments]), {}, 0
    for result in measure(options.rows, options.samples, options.only, options.seconds, offered(options.provider, {})):
        if len(result["ops"]) > shown:
            shown = len(result["ops"])
            print("{name:40s} {us:8.2f} us, floor {floor_us:7.2f}  {symbol}".format(**result["ops"][-1]), flush=True)
        if options.report:
            store(options.report, command, result)
    for row in result.get("ops", ()):
        print(f"{row['name']:40s} {row['us']:8.2f} us{beside(row)}")
    if not result:
        parser.error(f"no call's name begins with {options.only!r}")
    if options.report:
        store(options.report, command, result)
    print("\n".join(result["wrong"]) or "all outputs agree with their cards")
    if result["left_out"]:
        print(f"left out after {options.seconds} s: {', '.join(result['left_out'])}")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
