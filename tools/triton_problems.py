"""The calls whose kernels are assembled and lowered: every Triton kernel at V4.1-Flash's own shapes.

A call is made on meta tensors inside `launch.recording`, so the kernel, its argument types and its constants are those
that the same call would start on a device. Token counts are small on purpose: no tile depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepinfer_hal import row_layout
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, scale_shape
from deepinfer_triton.launch import Launch, recording
from deepinfer_triton.provider import triton_kernels
from deepinfer_triton.ranks import rank_kernels
from deepinfer_triton.ranks.windows import Windows
from deepinfer_triton.targets import Target

H, STREAMS, HEADS, D, ROPE, EXPERTS, TOP_K, INTER = 5120, 4, 64, 512, 64, 384, 6, 2304
INDEX_HEADS, INDEX_D, SELECTED, WINDOW, VOCAB = 32, 128, 512, 128, 129280
NGRAM, MARKOV, BLOCK, LOGPROBS = 4, 256, 5, 20
T, R = 64, 16

BF16, F32, U8, I32, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int32, torch.int64
ENGRAM_ROWS, ENGRAM_D, ENGRAM_COLUMNS, COMPRESSED_VOCAB = 384006168, 256, 24, 99092


@dataclass(frozen=True)
class Problem:
    """A named call of an op; `quantised_product`: both operands of its matrix product carry scales."""

    name: str
    op: str
    args: tuple[Any, ...]
    quantised_product: bool = False
    product: bool = False


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def handle(format: str, *shape: int) -> WeightHandle:
    """A weight without storage, in a checkpoint format."""
    if format in ("bf16", "f32"):
        return WeightHandle("problem", CanonicalWeight(format, meta(*shape, dtype=BF16 if format == "bf16" else F32)))
    *lead, last = shape
    values = meta(*lead, last // 2 if format == "fp4_row32" else last, dtype=U8)
    return WeightHandle("problem", CanonicalWeight(format, values, meta(*scale_shape(format, shape), dtype=U8)))


def _gemm(name: str, n: int, k: int, weight: str, out: torch.dtype = BF16, coded: bool = True) -> Problem:
    x, x_scale = (meta(T, k, dtype=U8), meta(T, k // 32, dtype=U8)) if coded else (meta(T, k), None)
    scale = meta(T, n // 32, dtype=U8) if out == U8 else None
    args = (x, x_scale, handle(weight, n, k), meta(1, dtype=I32), meta(T, n, dtype=out), scale)
    return Problem(f"linear {name}", "linear", args, coded and weight != "bf16", True)


def _grouped(name: str, n: int, k: int) -> Problem:
    x, x_scale = meta(T * TOP_K, k, dtype=U8), meta(T * TOP_K, k // 32, dtype=U8)
    offsets, out = meta(EXPERTS + 1, dtype=I32), meta(T * TOP_K, n)
    args = (x, x_scale, handle("fp4_row32", EXPERTS, n, k), offsets, out, None)
    return Problem(f"grouped_gemm {name}", "grouped_gemm", args, True, True)


def _grouped_linear() -> Problem:
    groups, k, n = 8, HEADS * D // 8, 1024
    codes = (meta(T, groups * k, dtype=U8), meta(T, groups * k // 32, dtype=U8))
    out = (meta(T, groups * n, dtype=U8), meta(T, groups * n // 32, dtype=U8))
    args = (*codes, handle("fp8_block32", groups, n, k), meta(1, dtype=I32), *out)
    return Problem("grouped_linear wo_a", "grouped_linear", args, True, True)


def _cache(format: str, width: int, block_rows: int) -> torch.Tensor:
    return meta(1024, row_layout.block_bytes(format, width, block_rows), dtype=U8)


def _attention(name: str, compressed: str | None) -> Problem:
    ints = [meta(R, dtype=I32) for _ in range(3)]
    paged = (None, None, "fp4_16", 64, None)
    if compressed:
        paged = (_cache(compressed, D, 64), meta(R, 2048, dtype=I32), compressed, 64, meta(T, SELECTED, dtype=I32))
    args = (
        meta(T, HEADS, D), _cache("fp8_32", D, 0), *ints, "fp8_32", *paged,
        meta(T, dtype=I32), meta(T, dtype=I32), meta(HEADS, dtype=F32), D**-0.5, WINDOW, meta(1, dtype=I32),
        meta(T, HEADS, D),
    )  # fmt: skip
    return Problem(f"sparse_attention {name}", "sparse_attention", args, product=True)


def _index(name: str, candidates: int | None) -> Problem:
    q, q_scale = meta(T, INDEX_HEADS, INDEX_D // 2, dtype=U8), meta(T, INDEX_HEADS, INDEX_D // 32, dtype=U8)
    width = 8 * candidates if candidates else 65536
    args = (
        q, q_scale, meta(T, INDEX_HEADS), _cache("mxfp4_32", INDEX_D, 64), meta(R, 2048, dtype=I32),
        meta(T, dtype=I32), meta(T, dtype=I32), meta(T, candidates, dtype=I32) if candidates else None, 8,
        "mxfp4_32", 64, meta(1, dtype=I32),
        meta(T, width, dtype=F32),
    )  # fmt: skip
    return Problem(f"score_index {name}", "score_index", args, product=True)


def _residual() -> Iterator[Problem]:
    count, streams = meta(1, dtype=I32), meta(T, STREAMS, H)
    mixes = (2 + STREAMS) * STREAMS
    pre, comb = meta(T, STREAMS, dtype=F32), meta(T, STREAMS, STREAMS, dtype=F32)
    yield Problem("rms_norm", "rms_norm", (meta(T, H), meta(H), 1e-20, count, meta(T, H), None, None))
    coded = (meta(T, H, dtype=U8), meta(T, H // 32, dtype=U8))
    yield Problem("rms_norm quantised", "rms_norm", (meta(T, H), meta(H), 1e-20, count, meta(T, H), *coded))
    table = meta(4096, ROPE, dtype=F32)
    yield Problem("rope", "rope", (meta(T, dtype=I32), table, False, count, meta(T, HEADS, D)))
    yield Problem("rope inverse", "rope", (meta(T, dtype=I32), table, True, count, meta(T, HEADS, D)))
    yield Problem("quantise fp8_32", "quantise", (meta(T, HEADS * D), "fp8_32", count, meta(T, HEADS * D, dtype=U8),
                                                  meta(T, HEADS * D // 32, dtype=U8), meta(T, dtype=U8)))  # fmt: skip
    rows = T * INDEX_HEADS
    packed = (meta(rows, INDEX_D // 2, dtype=U8), meta(rows, INDEX_D // 32, dtype=U8))
    yield Problem("quantise mxfp4_32", "quantise", (meta(rows, INDEX_D), "mxfp4_32", None, *packed, None))
    yield Problem("dequantise fp8_32", "dequantise", (*coded, "fp8_32", count, meta(T, H)))
    pre_args = (
        streams,
        meta(mixes, STREAMS * H, dtype=F32),
        meta(mixes, dtype=F32),
        meta(3, dtype=F32),
        pre,
        1e-20,
        1e-6,
    )
    yield Problem("hyper_connection_pre", "hyper_connection_pre", (*pre_args, 20, count, meta(T, H), pre, pre, comb))
    yield Problem("hyper_connection_post", "hyper_connection_post", (meta(T, H), pre, comb, count, streams))
    fn, tail = pre_args[1:4], (meta(H), 1e-20, 1e-6, 20, count, streams, meta(T, H), *coded, pre, pre, comb)
    yield Problem("residual_site", "residual_site", (meta(T, H), pre, comb, *fn, pre, *tail))
    yield Problem("residual_site first", "residual_site", (None, None, None, *fn, pre, *tail))
    yield Problem("stream_collapse", "stream_collapse", (streams, pre, count, meta(T, H)))


def _engram() -> Iterator[Problem]:
    count, columns = meta(1, dtype=I32), [meta(ENGRAM_COLUMNS, dtype=I64) for _ in range(2)]
    rows = meta(T, ENGRAM_COLUMNS, dtype=I64)
    lists = (meta(T, 4, dtype=I32), meta(VOCAB, dtype=I32), meta(4, dtype=I64), *columns)
    yield Problem("engram_hash", "engram_hash", (*lists, 2, count, rows))
    table, width = handle("fp8_row32", ENGRAM_ROWS, ENGRAM_D), ENGRAM_COLUMNS * ENGRAM_D
    codes = (meta(T, width, dtype=U8), meta(T, width // 32, dtype=U8))
    yield Problem("engram_lookup", "engram_lookup", (rows, table, count, *codes))
    yield Problem("engram_lookup dense", "engram_lookup", (rows, table, count, meta(T, width), None))
    weights = (meta(STREAMS, H), meta(STREAMS, H))
    kv = meta(T, (STREAMS + 1) * H)
    yield Problem("engram_gate", "engram_gate", (kv, *weights, 1e-20, count, meta(T, STREAMS, H)))


def _selection() -> Iterator[Problem]:
    count, visible = meta(1, dtype=I32), meta(T, dtype=I32)
    scores, pool = meta(T, 65536, dtype=F32), meta(T, 8 * 2048, dtype=F32)
    chosen, blocks = meta(T, SELECTED, dtype=I32), meta(T, 2048, dtype=I32)
    yield Problem("select_topk", "select_topk", (scores, None, 8, count, chosen))
    yield Problem("select_topk candidates", "select_topk", (pool, blocks, 8, count, chosen))
    yield Problem("select_candidate_blocks", "select_candidate_blocks", (scores, visible, 8, count, blocks))


def _moe() -> Iterator[Problem]:
    count, ids = meta(1, dtype=I32), meta(T, TOP_K, dtype=I32)
    pairs, weights = T * TOP_K, meta(T, TOP_K, dtype=F32)
    logits = (meta(T, EXPERTS, dtype=F32), meta(EXPERTS, dtype=F32))
    yield Problem(
        "route_topk", "route_topk", (*logits, TOP_K, 1.5, None, count, ids, weights, meta(EXPERTS, dtype=I32))
    )
    lists = (meta(EXPERTS + 1, dtype=I32), meta(pairs, dtype=I32), meta(T, TOP_K, dtype=I32))
    x = (meta(T, H, dtype=U8), meta(T, H // 32, dtype=U8))
    out = (meta(pairs, H, dtype=U8), meta(pairs, H // 32, dtype=U8))
    yield Problem("permute", "permute", (*x, ids, EXPERTS, count, *out, *lists))
    mid = (meta(pairs, INTER, dtype=U8), meta(pairs, INTER // 32, dtype=U8))
    weighed = (meta(pairs, dtype=F32), meta(pairs, dtype=I32))
    yield Problem("swiglu_quantise", "swiglu_quantise", (meta(pairs, 2 * INTER), *weighed, 10.0, count, *mid))
    yield Problem("unpermute", "unpermute", (meta(pairs, H), lists[2], meta(T, H), count, meta(T, H)))


def _cache_writes() -> Iterator[Problem]:
    count, slots, positions = meta(1, dtype=I32), meta(T, dtype=I32), meta(T, dtype=I32)
    table = meta(4096, ROPE, dtype=F32)
    for format, width, block_rows in (("fp8_32", D, 0), ("fp4_16", D, 64), ("mxfp4_32", INDEX_D, 64)):
        x, cache = meta(T, width), _cache(format, width, block_rows)
        latent = meta(T, width) if format == "fp4_16" else None
        tail = (slots, format, block_rows, count, cache)
        yield Problem(f"write_kv {format}", "write_kv", (x, meta(width), 1e-20, positions, table, *tail, latent))
        yield Problem(f"load_kv {format}", "load_kv", (cache, slots, format, block_rows, meta(T, width)))
        op = {"fp8_32": "store_window_kv", "fp4_16": "store_compressed_kv"}.get(format, "store_index_k")
        args = (x, slots, format, count, cache) if block_rows == 0 else (x, *tail)
        yield Problem(op, op, args)
    args = (meta(T, D), meta(D), 1e-20, positions, table, slots, "fp8_32", count, _cache("fp8_32", D, 0))
    yield Problem("store_draft_kv", "store_draft_kv", args)
    rows = [meta(T, D, dtype=F32), meta(T, D, dtype=F32), positions, meta(T, dtype=I32), meta(R + 1, dtype=I32)]
    groups = (meta(R, dtype=I32), meta(T // 2, dtype=I32), 2, meta(64, 7, 2, D, dtype=F32), meta(T // 2, D))
    yield Problem("compress_kv", "compress_kv", (*rows, *groups))


def _sampling() -> Iterator[Problem]:
    logits, i32 = meta(T, VOCAB, dtype=F32), meta(T, dtype=I32)
    f32, seeds = meta(T, dtype=F32), meta(T, dtype=I64)
    yield Problem("sample", "sample", (logits, f32, i32, f32, f32, seeds, i32, 0, i32))
    yield Problem("nan_row_flags", "nan_row_flags", (logits, meta(T, dtype=U8)))
    best = (meta(T, LOGPROBS, dtype=I32), meta(T, LOGPROBS, dtype=F32))
    yield Problem("top_logprobs", "top_logprobs", (logits, i32, f32, i32, *best))
    history, biases = meta(T, 131072, dtype=I32), (meta(T + 1, dtype=I32), meta(512, dtype=I32), meta(512, dtype=F32))
    args = (history, i32, i32, i32, f32, f32, f32, *biases)
    yield Problem("mask_logits", "mask_logits", (*args, None, logits))
    yield Problem("mask_logits allowed", "mask_logits", (*args, meta(T, VOCAB // 32, dtype=I32), logits))
    places, drafts = meta(R, BLOCK + 1, dtype=I32), meta(R, BLOCK, dtype=I32)
    both = (meta(R, BLOCK + 1, VOCAB, dtype=F32), meta(R, BLOCK, VOCAB, dtype=F32))
    for rule, given in (("coupled", (None, None)), ("rejection", both)):
        args = (places, drafts, meta(R, dtype=I32), *given, meta(R, dtype=I64), meta(R, dtype=I32), rule)
        yield Problem(f"verify_drafts {rule}", "verify_drafts", (*args, meta(R, dtype=I32), places))
    chances, cost = meta(T, BLOCK, dtype=F32), meta(T * (BLOCK + 1) + 1, dtype=F32)
    yield Problem("plan_verify_lengths", "plan_verify_lengths", (chances, cost, T, i32))


def _state() -> Iterator[Problem]:
    ids, history, count = meta(T, dtype=I32), meta(R, 131072, dtype=I32), meta(1, dtype=I32)
    yield Problem("advance_step", "advance_step", (ids, ids, ids, history))
    args = (history, meta(R, dtype=I32), ids, ids, count, ids)
    yield Problem("gather_tokens", "gather_tokens", (*args, meta(T, NGRAM, dtype=I32)))
    yield Problem("gather_tokens ids only", "gather_tokens", (*args, None))
    rows = meta(4096, 528, dtype=U8)
    yield Problem("copy_rows", "copy_rows", (rows, ids, ids, rows))
    yield Problem("copy_blocks", "copy_blocks", (ids, ids, _cache("fp4_16", D, 64)))
    yield Problem("snapshot_state", "snapshot_state", (ids, ids, meta(R, 43 * 136 * 528, dtype=U8)))


def _draft() -> Iterator[Problem]:
    f32 = meta(T, dtype=F32)
    yield Problem("draft_features", "draft_features", (meta(T, STREAMS, H), meta(1, dtype=I32), meta(T, 3 * H)[:, :H]))
    head = (meta(T, H), meta(T, MARKOV), meta(1, H + MARKOV), 1.0, f32, f32)
    yield Problem("confidence_head", "confidence_head", head)
    logits, mu = meta(T, VOCAB, dtype=F32), meta(T, MARKOV)
    tables = (handle("bf16", VOCAB, MARKOV), handle("bf16", VOCAB, MARKOV))
    yield Problem("markov_logits", "markov_logits", (logits, meta(T, dtype=I32), *tables, logits, mu), product=True)
    ints = [meta(R, dtype=I32) for _ in range(3)]
    q, drafts = meta(R * BLOCK, HEADS, D), _cache("fp8_32", D, 0)
    tail = (meta(HEADS, dtype=F32), D**-0.5, WINDOW, meta(1, dtype=I32), q)
    args = (q, _cache("fp8_32", D, 0), *ints, "fp8_32", meta(R, dtype=I32), drafts, BLOCK, *tail)
    yield Problem("draft_attention", "draft_attention", args, product=True)


class _Ranks:
    """A communicator of `world_size` ranks, for calls that are recorded: nothing is met and nothing moved."""

    rank, deadline_s = 0, 30.0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.windows = Windows(0, [0] * world_size, 256 << 20, torch.device("meta"), lambda state: state.tolist)
        self.begin = self.exchange = self.all_gather = self.broadcast = lambda *_: None


def _ranks(world: int) -> Iterator[Problem]:
    """The communication group among `world` ranks."""
    comm = _Ranks(world)
    experts, most = EXPERTS // world, T * TOP_K
    count, ids, weights = meta(1, dtype=I32), meta(T, TOP_K, dtype=I32), meta(T, TOP_K, dtype=F32)
    x = (meta(T, H, dtype=U8), meta(T, H // 32, dtype=U8))
    rows = (meta(most, H, dtype=U8), meta(most, H // 32, dtype=U8), meta(most, dtype=F32))
    where = (meta(experts + 1, dtype=I32), meta(most, 2, dtype=I32), meta(T, TOP_K, 2, dtype=I32))
    yield Problem(f"ep_dispatch {world}", "ep_dispatch", (comm, *x, ids, weights, experts, count, *rows, *where))
    back = (meta(most, H), meta(1, dtype=I32), *where[1:])
    yield Problem(f"ep_combine {world}", "ep_combine", (comm, *back, weights, meta(T, H), count, meta(T, H)))
    yield Problem(f"all_reduce {world}", "all_reduce", (comm, meta(T, H), "sum", meta(T, H)))
    yield Problem(f"all_gather {world}", "all_gather", (comm, meta(T, H), count, meta(world, T, H), meta(world, dtype=I32)))


def problems() -> list[Problem]:
    """Every kernel at least once, at V4.1's shapes and formats."""
    embed = (meta(T, dtype=I32), handle("bf16", VOCAB, H), meta(1, dtype=I32), meta(T, STREAMS, H))
    return [
        Problem("embedding_gather", "embedding_gather", embed),
        *_residual(),
        *_engram(),
        *_selection(),
        *_moe(),
        *_ranks(1),
        *_ranks(8),
        *_cache_writes(),
        _gemm("wq_a", 1280, H, "fp8_block32"),
        _gemm("wq_b", HEADS * D, 1280, "fp8_block32"),
        _gemm("wo_b", H, 8192, "fp8_block32"),
        _gemm("shared gate_up", 2 * INTER, H, "fp8_block32", U8),
        _gemm("router", EXPERTS, H, "bf16", F32, coded=False),
        _grouped_linear(),
        _grouped("gate_up", 2 * INTER, H),
        _grouped("down", H, INTER),
        _index("whole prefix", None),
        _index("candidates", 2048),
        _attention("window", None),
        _attention("window + fp4_16", "fp4_16"),
        *_sampling(),
        *_state(),
        *_draft(),
    ]


def launches(problem: Problem, target: Target, fn: Callable[..., None] | None = None) -> list[Launch]:
    """The kernels that the problem's call starts on `target`, without starting them; none where it has none for the op."""
    if fn is None:
        offered = (*triton_kernels(target), *rank_kernels(target))
        fn = {kernel.op: kernel.fn for kernel in offered}.get(problem.op, lambda *_: None)
    with recording() as made:
        fn(*problem.args)
    return made
