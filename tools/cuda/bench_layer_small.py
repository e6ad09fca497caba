"""Times what a layer of V4.1-Flash runs outside attention, GEMM, index and experts, on one GPU.

    python tools/cuda/bench_layer_small.py                         64 decode rows, each call by the kernel that serves it
    python tools/cuda/bench_layer_small.py --rows 256 --report reports/h200/layer_small.json
    python tools/cuda/bench_layer_small.py --provider triton rope_heads=8      Triton alone, with a changed target

The ops are those of a decode layer that takes its selection from an earlier one (deepinfer/model/layers.py, attention.py and
the composites' default parts), in their order, with the GEMMs, the attention and the expert products left out. One CUDA graph
holds all of them over several layers, whose buffers together exceed the last-level cache: `layer_us` is its time by layers.
Each op's own time comes from a graph of that op alone over the same buffers, in each layer. Both are read twice:

    cold    every layer has buffers of its own, as if all activations came from memory
    warm    layers share their activations and have weights of their own, as a step runs them

The small ops of layers that own compressed rows, an indexer or an Engram table are listed after them, each with how many of the
40 layers run it; `source_us_per_layer` is what they add to a layer on average.

Outputs are checked against the cards' float64 references before anything is timed. floor_us is the larger of what one launch
costs inside a graph and the card's bytes over the copy rate, both measured in the same run. torch_us is what torch has of an op
(torch_ops.py), over each layer's own buffers.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/cuda", ".", "hal", "backends/cuda", "backends/triton")]

import torch  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.errors import Unsupported  # noqa: E402
from deepinfer_hal.kernel import Kernel, Yes  # noqa: E402
from deepinfer_hal.ops._common import float64_reference  # noqa: E402
from deepinfer_hal.row_layout import block_bytes  # noqa: E402
from deepinfer_hal.statics import call_spec  # noqa: E402
from deepinfer_hal.weights import CanonicalWeight, WeightHandle  # noqa: E402
from graph_timing import microseconds, require_gpu  # noqa: E402
from provenance import provenance  # noqa: E402
from report import store  # noqa: E402
from torch_ops import beside, torch_row, torchs_own  # noqa: E402

H, STREAMS, HEADS, D, ROPE, LORA, EXPERTS, TOP_K, INTER = 5120, 4, 64, 512, 64, 1280, 384, 6, 2304
RING, POSITIONS, EPS = 134, 65536, 1e-20
LAYERS, INDEX_HEADS, INDEX_D, CARRY, NGRAMS, ENGRAM_D, TABLE_ROWS, VOCAB = 40, 32, 128, 7, 24, 256, 1 << 21, 129280
BF16, F32, U8, I32, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int32, torch.int64
CODE_SHARE = 0.01
Offered = dict[str, list[Kernel]]
TURNS = 4
"""How often a graph goes round its layers, so that starting it weighs little."""


def weights(gen: torch.Generator, device: str) -> SimpleNamespace:
    """What a layer has of its own: norms and the two sites' projections."""
    mixes = (2 + STREAMS) * STREAMS

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device) * scale

    def site() -> tuple[torch.Tensor, ...]:
        return normal(mixes, STREAMS * H, scale=(STREAMS * H) ** -0.5), normal(mixes), 1 + normal(3, scale=0.2)

    norms = [(1 + normal(width, scale=0.1)).to(BF16) for width in (H, H, LORA, D)]
    return SimpleNamespace(sites=(site(), site()), norms=norms, bias=normal(EXPERTS, scale=0.1))


def activations(rows: int, gen: torch.Generator, device: str) -> SimpleNamespace:
    """Everything that the ops read and write between the GEMMs, with random values where a GEMM would write."""

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device).to(dtype)

    def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def coded(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return empty(height, width, dtype=U8), empty(height, width // 32, dtype=U8)

    pairs = rows * TOP_K
    ring = torch.arange(rows, device=device) * RING
    positions = torch.randint(0, POSITIONS, (rows,), generator=gen, device=device)
    angle = torch.rand(POSITIONS, ROPE // 2, generator=gen, device=device) * 6.28
    return SimpleNamespace(
        streams=normal(rows, STREAMS, H), y=normal(rows, H), x=empty(rows, H), x_q=coded(rows, H),
        pre_a=torch.rand(rows, STREAMS, generator=gen, device=device), pre_b=empty(rows, STREAMS, dtype=F32),
        post=torch.rand(rows, STREAMS, generator=gen, device=device),
        comb=torch.softmax(normal(rows, STREAMS, STREAMS, dtype=F32), -1),
        joined=normal(rows, LORA + D), latent_q=coded(rows, LORA), q=normal(rows, HEADS, D), o=normal(rows, HEADS, D),
        o_q=coded(rows, HEADS * D), positions=positions.to(I32), table=torch.cat((angle.cos(), angle.sin()), 1),
        slots=(ring + positions % RING).to(I32), window=empty(rows * RING, block_bytes("fp8_32", D, 0), dtype=U8),
        logits=normal(rows, EXPERTS, dtype=F32), ids=empty(rows, TOP_K, dtype=I32), weights=empty(rows, TOP_K, dtype=F32),
        counts=empty(EXPERTS, dtype=I32), sorted_q=coded(pairs, H), offsets=empty(EXPERTS + 1, dtype=I32),
        source=empty(pairs, dtype=I32), inverse=empty(rows, TOP_K, dtype=I32), gate_up=normal(pairs, 2 * INTER),
        active=coded(pairs, INTER), expert_out=normal(pairs, H), shared_gate_up=normal(rows, 2 * INTER),
        shared_active=coded(rows, INTER), shared_out=normal(rows, H),
    )  # fmt: skip


def calls(w: SimpleNamespace, a: SimpleNamespace) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(name, op, arguments) of a layer's small ops in order."""

    def site(index: int, pre: torch.Tensor, after: torch.Tensor) -> tuple[Any, ...]:
        return (a.y, a.post, a.comb, *w.sites[index], pre, w.norms[index], EPS, 1e-6, 20, None, a.streams, a.x, *a.x_q, after,
                a.post, a.comb)  # fmt: skip

    rows = a.y.shape[0]
    yield "attention site", "residual_site", site(0, a.pre_a, a.pre_b)
    yield "query norm", "rms_norm", (a.joined[:, :LORA], w.norms[2], EPS, None, None, *a.latent_q)
    yield "query rope", "rope", (a.positions, a.table, False, None, a.q)
    yield "window row", "write_kv", (a.joined[:, LORA:], w.norms[3], EPS, a.positions, a.table, a.slots, "fp8_32", 0, None,
                                     a.window, None)  # fmt: skip
    yield "output rope", "rope", (a.positions, a.table, True, None, a.o)
    yield "output codes", "quantise", (a.o.view(rows, -1), "fp8_32", None, *a.o_q, None)
    yield "expert site", "residual_site", site(1, a.pre_b, a.pre_a)
    yield "router", "route_topk", (a.logits, w.bias, TOP_K, 1.5, None, None, a.ids, a.weights, a.counts)
    yield "permute", "permute", (*a.x_q, a.ids, EXPERTS, None, *a.sorted_q, a.offsets, a.source, a.inverse)
    routed = (a.gate_up, a.weights.view(-1), a.source, 10.0, a.offsets[EXPERTS:], *a.active)
    yield "experts' SwiGLU", "swiglu_quantise", routed
    yield "shared SwiGLU", "swiglu_quantise", (a.shared_gate_up, None, None, 10.0, None, *a.shared_active)
    yield "unpermute", "unpermute", (a.expert_out, a.inverse, a.shared_out, None, a.y)


def engram(gen: torch.Generator, device: str) -> SimpleNamespace:
    """An Engram layer's weights; its table has 2 097 152 rows (0.6 GB) in place of 384 million."""

    def normal(*shape: int) -> torch.Tensor:
        return (1 + torch.randn(shape, generator=gen, device=device) * 0.2).to(BF16)

    def random(high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=gen, device=device).to(dtype)

    codes, scales = random(120, TABLE_ROWS, ENGRAM_D, dtype=U8), random(8, TABLE_ROWS, ENGRAM_D // 32, dtype=U8) + 118
    primes = torch.tensor([TABLE_ROWS // NGRAMS - 2 * i for i in range(NGRAMS)], dtype=I64, device=device)
    return SimpleNamespace(
        table=WeightHandle("engram_table", CanonicalWeight("fp8_row32", codes, scales)), primes=primes,
        offsets=primes.cumsum(0) - primes, multipliers=random(1 << 45, 4, dtype=I64) * 2 + 1,
        token_map=random(99092, VOCAB, dtype=I32), q_weight=normal(STREAMS, H), k_weight=normal(STREAMS, H),
    )  # fmt: skip


def source_calls(w: SimpleNamespace, a: SimpleNamespace, e: SimpleNamespace, gen: torch.Generator) -> Iterator[Any]:
    """(name, op, arguments, layers of 40 that run it) of what only some layers run; every second row completes a pair."""
    rows, device = a.y.shape[0], a.y.device

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device).to(dtype)

    def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    every, paged = torch.arange(rows, dtype=I32, device=device), "fp4_16"
    complete = torch.where(a.positions % 2 == 1, every, -1)
    slots, carry = torch.where(complete >= 0, every * 64, -1), normal(rows, CARRY, 2, D, dtype=F32)
    starts = torch.arange(rows + 1, dtype=I32, device=device)
    gated = (normal(rows, D, dtype=F32), normal(rows, D, dtype=F32), a.positions, every, starts, every, complete)
    latent = normal(rows, D)
    yield "compressor", "compress_kv", (*gated, 2, carry, latent), 3
    main, keys = empty(rows, block_bytes(paged, D, 64), dtype=U8), empty(rows, block_bytes("mxfp4_32", INDEX_D, 64), dtype=U8)
    where = (EPS, a.positions, a.table, slots)
    yield "compressed row", "write_kv", (latent, w.norms[3], *where, paged, 64, None, main, empty(rows, D)), 4
    index = (normal(rows, INDEX_D), w.norms[3][:INDEX_D])
    yield "index key", "write_kv", (*index, *where, "mxfp4_32", 64, None, keys, None), 4
    query = normal(rows, INDEX_HEADS, INDEX_D)
    yield "index rope", "rope", (a.positions, a.table, False, None, query), 8
    width = INDEX_HEADS * INDEX_D
    coded = (empty(rows, width // 2, dtype=U8), empty(rows, width // 32, dtype=U8))
    yield "index codes", "quantise", (query.view(rows, -1), "mxfp4_32", None, *coded, None), 8
    ngrams = torch.randint(0, VOCAB, (rows, 4), generator=gen, device=device).to(I32)
    found, width = empty(rows, NGRAMS, dtype=I64), NGRAMS * ENGRAM_D
    yield "Engram hash", "engram_hash", (ngrams, e.token_map, e.multipliers, e.primes, e.offsets, 2, None, found), 2
    coded = (empty(rows, width, dtype=U8), empty(rows, width // 32, dtype=U8))
    yield "Engram lookup", "engram_lookup", (found, e.table, None, *coded), 2
    kv = normal(rows, (STREAMS + 1) * H)
    yield "Engram gate", "engram_gate", (kv, e.q_weight, e.k_weight, EPS, None, a.streams), 2


def offered(provider: str | None, changes: dict[str, int]) -> Offered:
    """Op to the kernels that the backend offers, the highest priority first, of one provider if asked."""
    from deepinfer_cuda import gpu
    from deepinfer_cuda.kernels import kernels_of
    from deepinfer_triton.provider import triton_kernels
    from deepinfer_triton.targets import cuda_target

    found = gpu.gpu_of(0)
    if changes:
        made = triton_kernels(dataclasses.replace(cuda_target(*found.capability), **changes))
    else:
        made = kernels_of(found)
    found_by_op: Offered = {}
    for kernel in sorted(made, key=lambda kernel: -kernel.priority):
        if provider in (None, kernel.provider):
            found_by_op.setdefault(kernel.op, []).append(kernel)
    return found_by_op


def kernel_of(kernels: Offered, op: str, args: tuple[Any, ...]) -> Kernel:
    """The first kernel that serves this call, as the dispatcher would choose. Raises Unsupported with every kernel's reason."""
    spec = call_spec(get_card(op), get_card(op).bind_args(args, {}))
    refused = []
    for kernel in kernels.get(op, ()):
        answer = kernel.supports(spec)
        if isinstance(answer, Yes):
            return kernel
        refused.append(f"{kernel.symbol}: {answer.reason}")
    raise Unsupported(f"no kernel serves this call of op {op!r}: {'; '.join(refused) or 'none is offered'}")


def check(name: str, op: str, fn: Callable[..., None], args: tuple[Any, ...]) -> str:
    """Runs the op on copies and compares with its card's float64 reference; the empty string, or what is wrong."""
    card = get_card(op)
    storages: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = value.untyped_storage().data_ptr()
        if key not in storages:
            whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            storages[key] = whole.clone()
        return storages[key].as_strided(value.shape, value.stride(), value.storage_offset())

    got = tuple(copy(value) for value in args)
    storages.clear()
    want = tuple(copy(value) for value in args)
    named = card.bind_args(args, {})
    with float64_reference():
        card.reference(*want)
    fn(*got)
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in args):
        torch.cuda.synchronize()
    for (arg, expected), result in zip(card.bind_args(want, {}).items(), got, strict=True):
        if arg not in card.outputs() or expected is None:
            continue
        if expected.is_floating_point():
            allowed = card.tolerance(named, arg)
            error = (result.double() - expected.double()).abs() - allowed.atol - allowed.rtol * expected.double().abs()
            if not bool(((error <= 0) | (result == expected)).all()):  # infinities are equal and have no difference
                return f"{name}: {arg} is off by {float((result.double() - expected.double()).abs().max()):.3g}"
        elif (share := float((result != expected).double().mean())) > (CODE_SHARE if expected.dtype == U8 else 0):
            return f"{name}: {share:.2%} of {arg} differ"
    return ""


def ceilings(samples: int) -> tuple[float, float]:
    """(microseconds of a launch inside a graph, bytes per second of an addition kernel over 1 GiB)."""
    small, large = torch.zeros(32, device="cuda"), torch.ones(1 << 27, device="cuda")
    launches = 256

    def add_often() -> None:
        for _ in range(launches):
            small.add_(1)

    launch = microseconds(add_often, samples) / launches
    rate = 2 * large.nbytes / (microseconds(lambda: large.add_(1), samples) * 1e-6)
    return launch, rate


def sequence(kernels: Offered, plan: list[tuple[str, str, tuple[Any, ...]]]) -> Callable[[], None]:
    """What runs the calls of a plan in order, each by the kernel that serves it."""
    bound = [(kernel_of(kernels, op, args).fn, args) for _, op, args in plan]

    def run() -> None:
        for fn, args in bound:
            fn(*args)

    return run


def measure(
    rows: int, layers: int, samples: int, kernels: Offered, seconds: float, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Hands the result, as plain values, to `keep` whenever something was added to it; begins nothing after `seconds`."""
    began = time.monotonic()
    gen = torch.Generator("cuda").manual_seed(11)
    own = [weights(gen, "cuda") for _ in range(layers)]
    cold = [activations(rows, gen, "cuda") for _ in range(layers)]
    modes = {"cold": list(zip(own, cold, strict=True)), "warm": [(w, cold[0]) for w in own]}
    launch_us, rate = ceilings(samples)
    ops: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "rows": rows, "layers": layers, "launch_us": launch_us,
        "copy_bytes_per_second": rate, **provenance(), "wrong": [], "left_out": [], "ops": ops, "source_ops": sources,
    }  # fmt: skip

    def per_layer(plan: list[tuple[str, str, tuple[Any, ...]]]) -> float:
        return microseconds(sequence(kernels, plan * TURNS), samples) / (layers * TURNS)

    def row_of(name: str, op: str, args: tuple[Any, ...]) -> dict[str, Any]:
        kernel = kernel_of(kernels, op, args)
        if fault := check(name, op, kernel.fn, args):
            result["wrong"].append(fault)
        kernel.fn(*args)  # what follows reads it
        nbytes = get_card(op).cost(get_card(op).bind_args(args, {})).bytes
        floor = max(launch_us, nbytes / rate * 1e6)
        return {"name": name, "op": op, "symbol": kernel.symbol, "bytes": nbytes, "floor_us": floor}

    def in_time(name: str) -> bool:
        if time.monotonic() - began > seconds:
            result["left_out"].append(name)
        return not result["left_out"]

    plans = {mode: [list(calls(w, a)) for w, a in pairs] for mode, pairs in modes.items()}
    ops.extend(row_of(*call) for call in plans["cold"][0])
    result["floor_us"] = sum(row["floor_us"] for row in ops)
    for mode, plan in plans.items():
        if in_time(f"{mode} layer"):
            result[f"{mode}_layer_us"] = per_layer(list(itertools.chain(*plan)))
            keep(result)
    for (index, row), (mode, plan) in itertools.product(enumerate(ops), plans.items()):
        if in_time(f"{mode} {row['name']}"):
            row[f"{mode}_us"] = per_layer([layer[index] for layer in plan])
            keep(result)
    table = engram(gen, "cuda")
    others = [list(source_calls(w, a, table, gen)) for w, a in modes["cold"]]
    for index, (*call, of_layers) in enumerate(others[0]):
        if in_time(call[0]):
            sources.append(row_of(*call) | {"layers": of_layers, "cold_us": per_layer([layer[index][:3] for layer in others])})
            keep(result)
    if not result["left_out"]:
        result |= {f"{mode}_ops_us": sum(row[f"{mode}_us"] for row in ops) for mode in plans}
        result["source_us_per_layer"] = sum(row["cold_us"] * row["layers"] for row in sources) / LAYERS
        keep(result)
    for index, row in enumerate(ops + sources):
        if in_time(f"torch {row['name']}"):
            of_layers = [(*small, *some)[index] for small, some in zip(plans["cold"], others, strict=True)]
            own = [torchs_own(op, get_card(op).bind_args(args, {})) for _, op, args, *_ in of_layers]
            row |= torch_row(own * TURNS, samples)
            keep(result)
    keep(result)


def show(result: dict[str, Any]) -> None:
    """Prints the result as a table; what was left out has no figure."""

    def said(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:6.2f}" if key in row else "     -"

    for row in result["ops"]:
        print(f"{row['name']:16s} cold {said(row, 'cold_us')}  warm {said(row, 'warm_us')}  floor {row['floor_us']:5.2f} us  "
              f"{row['symbol']}{beside(row)}")  # fmt: skip
    for row in result["source_ops"]:
        line = "{name:16s} cold {cold_us:6.2f}  in {layers} of 40   floor {floor_us:5.2f} us  {symbol}".format(**row)
        print(line + beside(row))
    print(f"a layer: cold {said(result, 'cold_layer_us')}, warm {said(result, 'warm_layer_us')}, sums of ops "
          f"{said(result, 'cold_ops_us')} and {said(result, 'warm_ops_us')}, floor {result['floor_us']:.2f} us; sources add "
          f"{said(result, 'source_us_per_layer')}; launch {result['launch_us']:.2f}")  # fmt: skip
    if result["left_out"]:
        print(f"left out for want of time: {', '.join(result['left_out'])}")
    print("\n".join(result["wrong"]) or "all outputs that were checked agree with their cards")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="decode rows")
    parser.add_argument("--layers", type=int, default=8, help="layers that a graph holds")
    parser.add_argument("--samples", type=int, default=30, help="of which the median is taken")
    parser.add_argument("--provider", help="kernels of this provider alone")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no further measurement after that")
    parser.add_argument("--report", type=Path, help="where to store the JSON, after each measurement")
    parser.add_argument("changes", nargs="*", help="field=value of the Triton target (Triton kernels alone)")
    options = parser.parse_args(arguments)
    require_gpu()
    changes = {name: int(value) for name, value in (one.split("=") for one in options.changes)}
    command = shlex.join(["python", "tools/cuda/bench_layer_small.py", *arguments])
    found: dict[str, Any] = {}

    def keep(result: dict[str, Any]) -> None:
        found.update(result)
        if options.report:
            store(options.report, command, result)

    measure(options.rows, options.layers, options.samples, offered(options.provider, changes), options.seconds, keep)
    show(found)
    return 1 if found["wrong"] or any(not name.startswith("torch ") for name in found["left_out"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
