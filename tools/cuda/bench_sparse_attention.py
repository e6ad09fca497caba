"""Times sparse_attention at DeepSeek-V4.1's sizes on one GPU, from the rows as the caches keep them.

    python tools/cuda/bench_sparse_attention.py                                        decode and prefill, the CUDA C++ kernel
    python tools/cuda/bench_sparse_attention.py --report reports/h200/sparse_attention.json
    python tools/cuda/bench_sparse_attention.py --provider triton --only decode
    python tools/cuda/bench_sparse_attention.py --only flat

Decode: 64, 256 and 1536 query rows, one or six of a request; a ring of 134 window rows of fp8_32 (128 of them keys) and 512 of
4096 compressed rows of fp4_16, chosen at random, in shuffled blocks of 64. Prefill: 4096 queries of one request with 65 536
compressed rows; 512 or 1024 of them and a window of 128 from a flat store, or 640 and none; the call expands all of them first,
in its workspace. Random codes, scales and queries.

Flat: the same prefill over BF16 stores that load_kv decodes beforehand, 640 or 1152 rows in any order, or 512 or 1024 ascending
ones and a window of 128; bits_of_the_caches_rows: all bits are those of the same call over the caches. with_load_kv_us has the
decoding of all 65 536 rows and of the window's in the graph, load_kv_share is what that adds to us, load_kv_us the decoding
alone. These three graphs are replayed in turn: attention runs at the board's power limit, and its clock falls from one second
to the next by more than the decoding takes.

A graph holds one call on each of several problems that together exceed the last-level cache; a time is the median over
replays of that graph, by its calls. Before it is timed a kernel's first rows are held against the card's reference in
float64, and a row alone, for which nothing is expanded first, must have the bits that it has in the batch. In the same run:
the rates of a large copy and of a large BF16 product, and, after all else since it heats the chip, what torch has (torch_us,
the better of its two ways), over keys gathered and decoded beforehand. floor_us is the time of the work at the product's rate,
had the weights been one BF16 number each; the kernel's two parts make it half as much again. Beside each time stand the GPU's
clock and power in such replays. The report is stored after every size.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/cuda", ".", "hal", "backends/cuda", "backends/triton")]

import torch  # noqa: E402
from deepinfer_hal import row_layout  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.ops._common import float64_reference  # noqa: E402
from gpu_state import state_while  # noqa: E402
from graph_timing import microseconds_in_turn, microseconds_of_a_call, require_gpu  # noqa: E402
from provenance import provenance  # noqa: E402
from report import store  # noqa: E402
from torch_ops import attention, torch_row  # noqa: E402

HEADS, D, WINDOW, RING, BLOCK = 64, 512, 128, 134, 64
DECODE = ((64, 1), (256, 1), (1536, 1), (64, 6), (256, 6), (1536, 6))
PREFILL = ((512, WINDOW), (640, 0), (1024, WINDOW))
FLAT = ((640, 0), (512, WINDOW), (1152, 0), (1024, WINDOW))
CACHE_BYTES = 240 << 20
"""What the buffers of a graph exceed together."""

QUERIES, CONTEXT, PREFILL_CONTEXT = 4096, 4096, 65536
CARD = get_card("sparse_attention")
BY_ROW = ("q", "rows", "row_to_req", "positions")
Args = dict[str, Any]
Call = Callable[..., None]


def stored_rows(count: int, format: str, gen: torch.Generator) -> torch.Tensor:
    """uint8 [count, row bytes]: rows drawn from 4096 quantised ones."""
    values = torch.randn(4096, D, generator=gen, device=gen.device)
    pool = torch.cat(row_layout.encode_rows(values, format), dim=1)
    rows = torch.empty(count, pool.shape[1], dtype=torch.uint8, device=gen.device)
    for first in range(0, count, 1 << 16):
        part = rows[first : first + (1 << 16)]
        part.copy_(pool[torch.randint(0, 4096, (part.shape[0],), generator=gen, device=gen.device)])
    return rows


def chosen_rows(queries: int, k: int, context: int, gen: torch.Generator) -> torch.Tensor:
    """int32 [queries, k]: k distinct rows of the context each, ascending."""
    rows = torch.empty(queries, k, dtype=torch.int32, device=gen.device)
    for part in rows.split(512):
        draw = torch.rand(part.shape[0], context, generator=gen, device=gen.device)
        part.copy_(draw.topk(k, dim=1).indices.sort(1).values)
    return rows


def problem(queries: int, requests: int, k: int, context: int, window: dict[str, Any], seed: int, device: str) -> Args:
    """A call's arguments: `requests` caches of `context` rows; `window` has the store's arguments and each row's position."""
    gen = torch.Generator(device).manual_seed(seed)
    blocks = requests * context // BLOCK
    ring = stored_rows(window.pop("stored"), "fp8_32", gen)
    return dict(
        q=torch.randn(queries, HEADS, D, generator=gen, device=device).to(torch.bfloat16),
        window=ring, window_format="fp8_32", compressed_format="fp4_16", block_rows=BLOCK,
        compressed=stored_rows(blocks * BLOCK, "fp4_16", gen).view(blocks, -1),
        block_table=torch.randperm(blocks, generator=gen, device=device).to(torch.int32).view(requests, -1),
        rows=chosen_rows(queries, k, context, gen),
        row_to_req=(torch.arange(queries, device=device) * requests // queries).to(torch.int32),
        sink=torch.randn(HEADS, generator=gen, device=device), scale=D**-0.5, count=None,
        out=torch.full((queries, HEADS, D), float("nan"), dtype=torch.bfloat16, device=device), **window,
    )  # fmt: skip


def ints(values: Any, device: str) -> torch.Tensor:
    return torch.as_tensor(values, device=device).to(torch.int32)


def decode_problem(queries: int, per_request: int, seed: int, device: str) -> Args:
    requests = -(-queries // per_request)
    row = torch.arange(queries)
    window = dict(
        stored=requests * RING, window_base=ints(torch.randperm(requests) * RING, device),
        window_origin=ints([0] * requests, device), window_modulo=ints([RING] * requests, device), window_tokens=WINDOW,
        positions=ints(CONTEXT - 8 + row % per_request, device),
    )  # fmt: skip
    args = problem(queries, requests, 512, CONTEXT, window, seed, device)
    args["row_to_req"] = ints(row // per_request, device)
    return args


def prefill_problem(k: int, window_tokens: int, seed: int, device: str) -> Args:
    stored = QUERIES + WINDOW
    window = dict(
        stored=stored, window_base=ints([0], device), window_origin=ints([PREFILL_CONTEXT - stored], device),
        window_modulo=ints([stored], device), window_tokens=window_tokens,
        positions=ints(torch.arange(PREFILL_CONTEXT - QUERIES, PREFILL_CONTEXT), device),
    )  # fmt: skip
    return problem(QUERIES, 1, k, PREFILL_CONTEXT, window, seed, device)


def flat_problem(k: int, window_tokens: int, seed: int, device: str, load_kv: Call) -> tuple[Args, Args, Call]:
    """A prefill call over the caches' rows, the same over BF16 stores decoded from them, and what decodes them again."""
    paged = prefill_problem(k, window_tokens, seed, device)
    if window_tokens == 0:
        gen = torch.Generator(device).manual_seed(seed)
        paged["rows"] = paged["rows"].gather(1, torch.rand(paged["rows"].shape, generator=gen, device=device).argsort(1))
    flat, parts = paged | {"out": torch.full_like(paged["out"], float("nan"))}, []
    for name, block_rows in (("window", 0), ("compressed", BLOCK)):
        cache, count = paged[name], paged[name].shape[0] * max(block_rows, 1)
        rows = torch.empty(count, D, dtype=torch.bfloat16, device=device)
        parts.append((cache, ints(torch.arange(count), device), paged[f"{name}_format"], block_rows, rows))
        flat |= {name: rows.view(torch.uint8).view(cache.shape[0], -1), f"{name}_format": "bf16"}

    def load() -> None:
        for part in parts:
            load_kv(*part)

    load()
    return paged, flat, load


def ordered(args: Args) -> list[Any]:
    return [args[name] for name in CARD.arg_names]


def some_rows(args: Args, rows: torch.Tensor, dtype: torch.dtype) -> Args:
    """The same call with these query rows alone and an output of its own."""
    few = {name: value[rows].contiguous() if name in BY_ROW else value for name, value in args.items()}
    return few | {"out": torch.full(few["q"].shape, float("nan"), dtype=dtype, device=rows.device)}


def check(kernel: Callable[..., None], args: Args) -> float:
    """Largest error over the card's tolerance in the first rows. ValueError for a wrong row, or one whose bits change alone."""
    kernel(*ordered(args))
    rows = torch.arange(4, device=args["q"].device)
    wanted = some_rows(args, rows, torch.float64)
    with float64_reference():
        CARD.reference(*ordered(wanted))
    allowed = CARD.tolerance(args, "out")
    difference = (args["out"][:4].double() - wanted["out"]).abs()
    ratio = float((difference / (allowed.atol + allowed.rtol * wanted["out"].abs())).max())
    alone = some_rows(args, rows[2:3], torch.bfloat16)
    kernel(*ordered(alone))
    if not ratio <= 1 or not torch.equal(alone["out"][0].view(torch.int16), args["out"][2].view(torch.int16)):
        raise ValueError(f"wrong: {ratio:.2f} times the tolerance, or a row whose bits depend on its batch")
    return ratio


def rate(args: Args, us: float) -> dict[str, float]:
    """The time of a call and what it makes of the product's work."""
    keys = args["rows"].shape[1] + args["window_tokens"]
    flops = 4 * HEADS * D * keys * args["q"].shape[0]
    return dict(us=round(us, 1), tflops=round(flops / us * 1e-6, 1))


def measure(kernel: Callable[..., None], problems: list[Args], replays: int) -> dict[str, Any]:
    """One size: time, what share of the product's work that is, the error of its first rows, and the board's state."""
    ratio = check(kernel, problems[0])
    calls = [lambda args=args: kernel(*ordered(args)) for args in problems]
    us = microseconds_of_a_call(calls, replays, discarded=1)
    found = rate(problems[0], us) | dict(error_over_tolerance=round(ratio, 3), problems=len(problems))
    return found | state_while(lambda: [call() for call in calls])


def measure_flat(kernel: Call, k: int, window_tokens: int, load_kv: Call, replays: int) -> dict[str, Any]:
    """As measure, over decoded stores; whether the bits are those of the caches' rows, and the times with and of the decoding."""
    made = [flat_problem(k, window_tokens, seed, "cuda", load_kv) for seed in range(2)]
    paged, flat, _ = made[0]
    ratio = check(kernel, flat)
    kernel(*ordered(paged))
    equal = torch.equal(paged["out"].view(torch.int16), flat["out"].view(torch.int16))

    def run(*, loads: bool, attends: bool) -> None:
        for _, flat, load in made:
            if loads:
                load()
            if attends:
                kernel(*ordered(flat))

    parts = (dict(loads=False, attends=True), dict(loads=True, attends=True), dict(loads=True, attends=False))
    times = microseconds_in_turn([lambda part=part: run(**part) for part in parts], replays, discarded=1)
    us, whole, load_us = (time / len(made) for time in times)
    found = rate(flat, us) | dict(error_over_tolerance=round(ratio, 3), problems=len(made))
    found |= state_while(lambda: run(loads=False, attends=True)) | dict(bits_of_the_caches_rows=equal)
    return found | dict(with_load_kv_us=round(whole, 1), load_kv_share=round(whole / us - 1, 3), load_kv_us=round(load_us, 1))


def torch_attention(queries: int, keys: int, replays: int) -> dict[str, Any]:
    """What torch takes for so many keys of each query: the better of its ways, and which."""
    q = torch.randn(queries, HEADS, D, device="cuda", dtype=torch.bfloat16)
    problems = -(-CACHE_BYTES // (queries * keys * D * 2))
    gathered = [torch.randn(queries, keys, D, device="cuda", dtype=torch.bfloat16) for _ in range(problems)]
    ways = zip(*(attention(q, one) for one in gathered), strict=True)
    best = min((torch_row(way, replays) for way in ways), key=lambda row: row["torch_us"])
    return best | dict(torch_us=round(best["torch_us"], 1))


def ceilings(device: str) -> dict[str, float]:
    a = torch.randn(8192, 8192, device=device).to(torch.bfloat16)
    big = [torch.randn(1 << 29, device=device).to(torch.bfloat16) for _ in range(2)]
    product = microseconds_of_a_call([lambda: a @ a.T], 5, discarded=1)
    copy = microseconds_of_a_call([lambda: torch.add(big[0], 1, out=big[1])], 5, discarded=1)
    return dict(matmul_tflops=round(2 * 8192**3 / product * 1e-6, 1), copy_tb_s=round(4 * (1 << 29) / copy * 1e-6, 3))


def find_kernel(provider: str, op: str = CARD.name) -> tuple[str, Callable[..., None]]:
    """The provider's kernel of an op on the first GPU and its symbol. SystemExit where there is none."""
    from deepinfer_cuda import gpu
    from deepinfer_cuda.kernels import kernels_of

    for kernel in kernels_of(gpu.gpu_of(0)):
        if (kernel.op, kernel.provider) == (op, provider):
            return kernel.symbol, kernel.fn
    raise SystemExit(f"{provider} offers no {op} on this GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--provider", default="cuda", help="cuda (C++) or triton")
    parser.add_argument("--only", choices=("decode", "prefill", "flat"), help="one part alone")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--report", type=Path, help="JSON file to store")
    options = parser.parse_args()
    require_gpu()
    (symbol, kernel), (load_symbol, load_kv) = find_kernel(options.provider), find_kernel("triton", "load_kv")
    measured, sizes = ceilings("cuda"), {}
    asked: dict[tuple[int, int], list[str]] = {}
    print(measured)
    found = dict(gpu=torch.cuda.get_device_name(0), symbol=symbol, load_kv_symbol=load_symbol, ceilings=measured, sizes=sizes)
    found |= provenance({CARD.name: symbol, "load_kv": load_symbol})

    def keep_all() -> None:
        if options.report:
            store(options.report, shlex.join(["python", *sys.argv]), found)

    def keep(name: str, size: dict[str, Any], queries: int, keys: int) -> None:
        """Adds a size of so many queries and keys of each with its floor, and stores what there is."""
        asked.setdefault((queries, keys), []).append(name)
        floor = round(size["us"] * size["tflops"] / measured["matmul_tflops"], 1)
        sizes[name] = size | dict(floor_us=floor)
        print(f"{name}: {size['us'] / floor:.2f} of its floor,", sizes[name], flush=True)
        keep_all()

    for queries, per_request in DECODE if options.only in (None, "decode") else ():
        problems = [decode_problem(queries, per_request, seed, "cuda") for seed in range({64: 12, 256: 6}.get(queries, 3))]
        name = f"decode, {queries} rows, {per_request} a request"
        keep(name, measure(kernel, problems, options.replays), queries, 512 + WINDOW)
    for k, window_tokens in PREFILL if options.only in (None, "prefill") else ():
        problems = [prefill_problem(k, window_tokens, seed, "cuda") for seed in range(2)]
        name = f"prefill, {QUERIES} queries, {k} of {PREFILL_CONTEXT} rows and a window of {window_tokens}"
        keep(name, measure(kernel, problems, options.replays), QUERIES, k + window_tokens)
    for k, window_tokens in FLAT if options.only in (None, "flat") else ():
        name = f"flat prefill, {QUERIES} queries, {k} of {PREFILL_CONTEXT} rows and a window of {window_tokens}"
        keep(name, measure_flat(kernel, k, window_tokens, load_kv, options.replays), QUERIES, k + window_tokens)
    for (queries, keys), names in asked.items():
        theirs = torch_attention(queries, keys, options.replays)
        print(f"{queries} queries of {keys} keys: {theirs}", flush=True)
        for name in names:
            sizes[name] |= theirs
        keep_all()


if __name__ == "__main__":
    main()
