"""Times the lightning indexer at V4.1-Flash's shapes on one GPU: scores, top 512, the pool of candidate blocks.

    python tools/cuda/bench_index.py
    python tools/cuda/bench_index.py --provider triton --report reports/h200/index.json

Each time is the median of replays of a CUDA graph that rotates over sets of buffers larger than the last-level cache together,
filled with random codes, scales, queries and weights. What is timed is checked first: scores of sampled rows against the card's
float64 reference, selections exactly against the card's reference on the same scores. The ceilings are measured in the same
run. FLOPs count two for each head, width and visible key of a row; bytes count each request's keys once. `torch`, after all else,
is what torch has: for a selection torch.topk followed by a sort of the indices, on such scores; for scores products in BF16 over
keys that were decoded beforehand (torch_ops.py), whose bytes these are. The report is stored after every case.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/cuda", ".", "hal", "backends/cuda", "backends/triton")]

import torch  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.kernel import CallSpec, Kernel, Yes  # noqa: E402
from deepinfer_hal.ops._common import float64_reference  # noqa: E402
from graph_timing import microseconds, require_gpu  # noqa: E402
from provenance import provenance  # noqa: E402
from report import store  # noqa: E402
from torch_ops import index_scores  # noqa: E402

HEADS, WIDTH, BLOCK_ROWS, KEY_BYTES, TOP, POOL, POOL_BLOCK = 32, 128, 64, 68, 512, 2048, 8
ROW_FLOPS = 2 * HEADS * WIDTH
SCALES = (124, 127)
"""Range of the random ue8m0 codes, for values of about the size of normal ones, which the card's tolerance is made for."""


@dataclass
class Measured:
    """A case: the calls that rotate, what they move and compute, the issue's bar, and what checks their outputs."""

    name: str
    calls: list[Callable[[], None]]
    bytes: int = 0
    flops: int = 0
    bar: str = ""
    check: Callable[[], str] = field(default=lambda: "")


def _random(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


def _ints(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def make_cache(requests: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache, block_table) of `rows` random index keys for each request, its blocks in random order."""
    blocks = requests * rows // BLOCK_ROWS
    cache = _random(0, 256, blocks, BLOCK_ROWS * KEY_BYTES)
    cache[:, BLOCK_ROWS * WIDTH // 2 :] = _random(*SCALES, blocks, BLOCK_ROWS * WIDTH // 32)
    return cache, torch.randperm(blocks, device="cuda").to(torch.int32).reshape(requests, -1)


def score_call(store: tuple[torch.Tensor, torch.Tensor], requests: Any, visible: Any, columns: int, pool: Any = None) -> dict:
    """Arguments of score_index, by name, with random queries."""
    rows = len(requests)
    return dict(
        q=_random(0, 256, rows, HEADS, WIDTH // 2),
        q_scale=_random(*SCALES, rows, HEADS, WIDTH // 32),
        weights=torch.randn(rows, HEADS, device="cuda").to(torch.bfloat16),
        cache=store[0],
        block_table=store[1],
        row_to_req=_ints(requests),
        visible=_ints(visible),
        candidates=pool,
        candidate_block=POOL_BLOCK,
        format="mxfp4_32",
        block_rows=BLOCK_ROWS,
        count=None,
        scores=torch.empty(rows, columns, device="cuda"),
    )


def check_scores(kernel: Callable[..., None], args: dict, rows: list[int]) -> str:
    """What is wrong with the scores of some rows, against the card's float64 reference; empty if nothing."""
    card = get_card("score_index")
    kernel(*args.values())
    got = args["scores"][rows].double()
    some = {**args, "scores": torch.full((len(rows), got.shape[1]), float("nan"), dtype=torch.float64, device="cuda")}
    for name in ("q", "q_scale", "weights", "row_to_req", "visible", "candidates"):
        some[name] = None if args[name] is None else args[name][rows].contiguous()
    with float64_reference():
        card.reference(*some.values())
    finite = some["scores"].isfinite()
    allowed = card.tolerance(args, "scores")
    error = (got - some["scores"])[finite].abs() - allowed.atol - allowed.rtol * some["scores"][finite].abs()
    same = torch.equal(finite, got.isfinite())
    return "" if same and bool((error <= 0).all()) else f"scores off by {float((got - some['scores'])[finite].abs().max()):.3g}"


def check_selection(op: str, kernel: Callable[..., None], args: tuple[Any, ...]) -> str:
    """How many rows of a selection differ from the card's reference on the same scores; empty if none."""
    got, want = args[-1], args[-1].clone()
    kernel(*args)
    get_card(op).reference(*args[:-1], want)
    wrong = int((got != want).any(1).sum())
    return f"{wrong} rows differ" if wrong else ""


def score_cases(score: Callable[..., None], topk: Callable[..., None], contexts: int, keys: int) -> Iterator[Measured]:
    """Decode rows of `contexts` requests: scores, top 512, both; six rows a request; candidate blocks."""
    stores = [make_cache(contexts, keys) for _ in range(2)]
    nbytes, flops = contexts * keys * KEY_BYTES, contexts * keys * ROW_FLOPS
    calls = [score_call(one, range(contexts), [keys] * contexts, keys) for one in stores]
    what = f"{contexts} rows x {keys}"
    yield Measured(
        f"scores, {what}",
        [lambda a=a: score(*a.values()) for a in calls],
        nbytes,
        flops,
        "100 us, stretch 85",
        lambda: check_scores(score, calls[0], [0, contexts - 1]),
    )
    for a in calls:
        score(*a.values())
    yield from selection_cases(topk, [a["scores"] for a in calls], contexts, keys)
    ids = torch.empty(len(calls), contexts, TOP, dtype=torch.int32, device="cuda")

    def both(args: dict, out: torch.Tensor) -> None:
        score(*args.values())
        topk(args["scores"], None, POOL_BLOCK, None, out)

    together = [lambda a=a, o=o: both(a, o) for a, o in zip(calls, ids, strict=True)]
    yield Measured(f"scores and top {TOP}, {what}", together, nbytes, flops, "120 us")
    yield from shared_key_cases(score, stores, contexts, keys)


def selection_cases(topk: Callable[..., None], scored: list[torch.Tensor], contexts: int, keys: int) -> Iterator[Measured]:
    """The best 512 of rows of scores, and of ties."""
    what, nbytes = f"{contexts} rows x {keys}", 4 * contexts * keys
    sets = {
        "": scored + [40 * torch.randn(contexts, keys, device="cuda") for _ in range(4)],
        ", all equal": [torch.full((contexts, keys), float(n), device="cuda") for n in range(6)],
        ", four values": [torch.randint(0, 4, (contexts, keys), device="cuda").float() for _ in range(6)],
    }
    ids = torch.empty(6, contexts, TOP, dtype=torch.int32, device="cuda")
    for kind, scores in sets.items():
        some = [(s, None, POOL_BLOCK, None, out) for s, out in zip(scores, ids, strict=True)]
        yield Measured(
            f"top {TOP}{kind}, {what}",
            [lambda a=a: topk(*a) for a in some],
            nbytes,
            0,
            "35 us",
            lambda a=some[0]: check_selection("select_topk", topk, a),
        )


def shared_key_cases(score: Callable[..., None], stores: list[Any], contexts: int, keys: int) -> Iterator[Measured]:
    """Six rows of each request, which share its keys, and candidate blocks of one row each."""
    rows = range(contexts)
    six = [
        score_call(one, [r for r in rows for _ in range(6)], [keys - 5 + i for _ in rows for i in range(6)], keys)
        for one in stores
    ]
    yield Measured(
        f"scores, {contexts} x 6 rows x {keys}",
        [lambda a=a: score(*a.values()) for a in six],
        contexts * keys * KEY_BYTES,
        6 * contexts * keys * ROW_FLOPS,
        check=lambda: check_scores(score, six[0], [0, 5, 6 * contexts - 1]),
    )
    pools = [
        torch.rand(contexts, keys // POOL_BLOCK, device="cuda").topk(POOL).indices.sort().values.to(torch.int32) for _ in stores
    ]
    some = [score_call(one, rows, [keys] * contexts, POOL * POOL_BLOCK, pool) for one, pool in zip(stores, pools, strict=True)]
    yield Measured(
        f"scores, {contexts} rows x {POOL} candidate blocks of {keys}",
        [lambda a=a: score(*a.values()) for a in some],
        contexts * POOL * POOL_BLOCK * KEY_BYTES,
        contexts * POOL * POOL_BLOCK * ROW_FLOPS,
        check=lambda: check_scores(score, some[0], [0, contexts - 1]),
    )


def prefill_cases(score: Callable[..., None], topk: Callable[..., None], rows: int, keys: int) -> Iterator[Measured]:
    """Rows of one request over all of its keys, and as a causal chunk sees them."""
    one = make_cache(1, keys)
    for kind, seen, bar in (("", [keys] * rows, "450 TFLOP/s"), (", causal", range(keys - rows + 1, keys + 1), "")):
        args = score_call(one, [0] * rows, seen, keys)
        yield Measured(
            f"scores, prefill{kind}, {rows} rows x {keys}",
            [lambda a=args: score(*a.values())],
            keys * KEY_BYTES + 4 * rows * keys,
            sum(seen) * ROW_FLOPS,
            bar,
            lambda a=args: check_scores(score, a, [0, rows - 1]),
        )
    score(*args.values())
    selected = (args["scores"], None, POOL_BLOCK, None, torch.empty(rows, TOP, dtype=torch.int32, device="cuda"))
    yield Measured(
        f"top {TOP}, {rows} rows x {keys}",
        [lambda: topk(*selected)],
        4 * rows * keys,
        check=lambda: check_selection("select_topk", topk, tuple(t[:64] if isinstance(t, torch.Tensor) else t for t in selected)),
    )


def prompt_cases(score: Callable[..., None], topk: Callable[..., None], rows: int, keys: int) -> Iterator[Measured]:
    """Rows of a prompt's first `keys` positions, the last `rows` of them, whose candidates are all blocks that they see; the best
    512 of them."""
    seen = torch.arange(keys - rows + 1, keys + 1, device="cuda")
    ids = torch.arange(keys // POOL_BLOCK, device="cuda").expand(rows, -1)
    candidates = torch.where(ids * POOL_BLOCK < seen[:, None], ids, -1).to(torch.int32)
    args = score_call(make_cache(1, keys), [0] * rows, seen.tolist(), keys, candidates)
    yield Measured(
        f"scores, prompt, {rows} rows x {keys // POOL_BLOCK} candidate blocks",
        [lambda: score(*args.values())],
        keys * KEY_BYTES + 4 * rows * keys,
        int(seen.sum()) * ROW_FLOPS,
        check=lambda: check_scores(score, args, [0, rows - 1]),
    )
    score(*args.values())
    selected = (args["scores"], candidates, POOL_BLOCK, None, torch.empty(rows, TOP, dtype=torch.int32, device="cuda"))
    yield Measured(
        f"top {TOP}, prompt, {rows} rows x {keys}",
        [lambda: topk(*selected)],
        4 * rows * keys,
        check=lambda: check_selection("select_topk", topk, selected),
    )


def pool_cases(pool: Callable[..., None], keys: int) -> Iterator[Measured]:
    """The pool of candidate blocks over long rows."""
    for rows in (1, 8, 64):
        scores = [40 * torch.randn(rows, keys, device="cuda") for _ in range(max(2, 32 // rows))]
        some = [
            (s, _ints([keys] * rows), POOL_BLOCK, None, torch.empty(rows, POOL, dtype=torch.int32, device="cuda")) for s in scores
        ]
        yield Measured(
            f"pool of {POOL} blocks, {rows} rows x {keys}",
            [lambda a=a: pool(*a) for a in some],
            4 * rows * keys,
            check=lambda a=some[0]: check_selection("select_candidate_blocks", pool, a),
        )


def torch_cases(contexts: int, rows: int, keys: int, pool_keys: int) -> Iterator[Measured]:
    """What torch has, on random values: scores of decode rows of their own requests and of a prompt's rows, selections, pools."""
    for what, queries, requests in ((f"{contexts} rows", contexts, contexts), (f"prefill, {rows} rows", rows, 1)):
        q = torch.randn(queries, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(queries, HEADS, device="cuda", dtype=torch.bfloat16)
        decoded = torch.randn(requests, keys, WIDTH, device="cuda", dtype=torch.bfloat16)
        call, flops = index_scores(q, weights, decoded).call, queries * keys * ROW_FLOPS
        yield Measured(f"torch: scores, {what} x {keys}", [call], decoded.nbytes, flops)
        del q, weights, decoded, call
    scores = [torch.randn(contexts, keys, device="cuda") for _ in range(6)]
    best = [lambda s=s: s.topk(TOP, sorted=False).indices.sort() for s in scores]
    yield Measured(f"torch: top {TOP}, {contexts} rows x {keys}", best, scores[0].nbytes)
    for some in (1, 8, 64):
        scores = [torch.randn(some, pool_keys, device="cuda") for _ in range(max(2, 32 // some))]
        best = [lambda s=s: s.view(s.shape[0], -1, POOL_BLOCK).amax(-1).topk(POOL, sorted=False).indices.sort() for s in scores]
        yield Measured(f"torch: pool of {POOL} blocks, {some} rows x {pool_keys}", best, scores[0].nbytes)


def ceilings(samples: int) -> dict[str, float]:
    """Copy rate over 1 GiB (read and written) and the BF16 rate of an 8192^3 product, both of torch."""
    large, matrix = torch.ones(1 << 28, device="cuda"), torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    copy, product = microseconds(lambda: large.add_(1), samples), microseconds(lambda: matrix @ matrix, samples)
    return {"copy_bytes_per_second": 2 * large.nbytes / copy * 1e6, "bf16_flops_per_second": 2 * 8192**3 / product * 1e6}


def offered(provider: str | None) -> dict[str, Kernel]:
    """Op to the kernel of the highest priority that serves MXFP4, of one provider if asked."""
    from deepinfer_cuda import gpu
    from deepinfer_cuda.kernels import kernels_of

    chosen = {}
    for kernel in sorted(kernels_of(gpu.gpu_of(0)), key=lambda kernel: kernel.priority):
        spec = CallSpec(kernel.op, {"q": "u8", "format": "mxfp4_32"})
        if provider in (None, kernel.provider) and isinstance(kernel.supports(spec), Yes):
            chosen[kernel.op] = kernel
    return chosen


def measure(kernels: dict[str, Kernel], samples: int) -> Iterator[dict[str, Any]]:
    """The result so far, as plain values, after each case."""
    torch.manual_seed(11)
    score, topk, pool = (kernels[op].fn for op in ("score_index", "select_topk", "select_candidate_blocks"))
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), **ceilings(samples), "cases": []}
    result |= provenance({op: kernels[op].symbol for op in ("score_index", "select_topk", "select_candidate_blocks")})
    sources = (
        score_cases(score, topk, 64, 65536),
        prefill_cases(score, topk, 4096, 65536),
        prompt_cases(score, topk, 2048, 4096),
        pool_cases(pool, 1 << 20),
        torch_cases(64, 4096, 65536, 1 << 20),
    )
    for source in sources:
        for case in source:
            wrong = case.check()
            took = microseconds(lambda case=case: [call() for call in case.calls], samples) / len(case.calls)
            row = {"name": case.name, "us": took, "bytes": case.bytes, "flops": case.flops, "bar": case.bar, "wrong": wrong}
            floors = case.bytes / result["copy_bytes_per_second"], case.flops / result["bf16_flops_per_second"]
            result["cases"].append({**row, "floor_us": max(floors) * 1e6})
            print(
                f"{case.name:52s} {took:9.1f} us  {case.bytes / took / 1e6:5.2f} TB/s {case.flops / took / 1e6:6.0f} TFLOP/s"
                f"  {case.bar:20s}{wrong}",
                flush=True,
            )
            yield result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20, help="replays of which the median is taken")
    parser.add_argument("--provider", help="kernels of this provider alone")
    parser.add_argument("--report", type=Path, help="where to store the JSON")
    options = parser.parse_args(arguments)
    require_gpu()
    for result in measure(offered(options.provider), options.samples):
        if options.report:
            store(options.report, shlex.join(["python", "tools/cuda/bench_index.py", *arguments]), result)
    return 1 if any(case["wrong"] for case in result["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
