"""What `deepinfer hal bench` measures: every op at the shapes that a model calls it with, as cases of its card.

Rows are those of a decode step (1, 16, 64) and of a prefill chunk (256); ops that see a sequence once a step, such as
`sample`, have decode rows only. Experts are those of one rank: with e of E of them on each rank and t tokens of its own, a rank
computes t * k expert rows, spread over its e experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.card import Case
from deepinfer_hal.errors import BadCall

DECODE_ROWS = (1, 16, 64)
PREFILL_ROWS = 256
_PAIR_ROWS = (1, 12)
"""Rows of copies within one store, of which the cards' cases have thirty."""


@dataclass(frozen=True)
class ModelShapes:
    """Sizes of a model; `context`: tokens before the measured ones. engram_rows stands for a table of many more."""

    hidden: int
    heads: int
    q_lora: int
    groups: int
    o_lora: int
    index_heads: int
    topk: int
    candidates: int
    experts: int
    top_k: int
    expert_width: int
    vocab: int
    engram_dim: int
    engram_heads: int
    engram_vocab: int
    engram_rows: int
    markov_rank: int
    context: int
    head_dim: int = 512
    rope: int = 64
    index_dim: int = 128
    streams: int = 4
    draft_block: int = 5


V41 = ModelShapes(
    hidden=5120, heads=64, q_lora=1280, groups=8, o_lora=1024, index_heads=32, topk=512, candidates=2048, experts=384, top_k=6,
    expert_width=2304, vocab=129280, engram_dim=256, engram_heads=8, engram_vocab=99092, engram_rows=400_000, markov_rank=256,
    context=4096,
)  # fmt: skip

NANO = ModelShapes(
    hidden=256, heads=4, q_lora=64, groups=2, o_lora=64, index_heads=4, topk=64, candidates=32, experts=8, top_k=2,
    expert_width=128, vocab=2048, engram_dim=32, engram_heads=2, engram_vocab=1484, engram_rows=24064, markov_rank=32,
    context=512,
)  # fmt: skip

MODELS = {"v41": V41, "nano": NANO}

NOT_MEASURED = {
    "all_gather": "moves bytes between ranks; one device alone has nothing to measure",
    "all_reduce": "moves bytes between ranks; one device alone has nothing to measure",
    "barrier": "moves no bytes",
    "broadcast": "moves bytes between ranks; one device alone has nothing to measure",
}
"""Ops without shapes here, and why."""


@dataclass(frozen=True)
class BenchCase:
    """One row of the benchmark.

    use: what the model calls the op for. rows: of the step. elements: values that making the case draws, its weights, stores and
    logits, from which memory and time are foreseen; gathered: of these, values of tables that are only read by the row, which
    neither the reference nor a layout expands; coded: whether the values are quantised when drawn. vary: index arguments and
    their limits, shifted in every buffer so that rows gathered from a shared table are others.
    """

    case: Case
    rows: int
    use: str = ""
    elements: int = 0
    gathered: int = 0
    coded: bool = True
    vary: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """Op and use: the rows of one share its weights."""
        return self.case.op, self.use


def bench_cases(model: ModelShapes, experts: int, rows: tuple[int, ...] = (), ops: tuple[str, ...] = ()) -> Iterator[BenchCase]:
    """All rows of the benchmark, by op; rows, ops: only these (empty: all). experts: on one rank."""
    if not 1 <= experts <= model.experts:
        raise BadCall(f"experts of one rank must be 1 to {model.experts}, got {experts}")
    for op, make in sorted(_CASES.items()):
        if not ops or op in ops:
            yield from (one for one in make(op, model, experts) if not rows or one.rows in rows)


# ------------------------------------------------------------------------------------------------- helpers

Maker = Callable[[str, ModelShapes, int], Iterator[BenchCase]]
_CASES: dict[str, Maker] = {}


def _measures(*ops: str) -> Callable[[Maker], Maker]:
    def keep(make: Maker) -> Maker:
        _CASES.update(dict.fromkeys(ops, make))
        return make

    return keep


def _all_rows() -> tuple[int, ...]:
    return (*DECODE_ROWS, PREFILL_ROWS)


def _row(op: str, rows: int, use: str = "", elements: int = 0, /, **params: Any) -> BenchCase:
    coded = params.get("w") != "bf16" and op not in _DRAWN_AS_THEY_ARE
    return BenchCase(Case(op, params), rows, use, elements, coded=coded)


_DRAWN_AS_THEY_ARE = frozenset({
    "markov_logits", "mask_logits", "sample", "top_logprobs", "nan_row_flags", "verify_drafts", "select_topk",
    "select_candidate_blocks",
})  # fmt: skip
"""Ops whose cases hold no codes of which much is drawn."""


def _requests(rows: int, first: int, start: int = 0) -> str:
    """Decode rows are one token each of so many sequences, a prefill chunk is one sequence."""
    return f"{start}+{rows}" if rows > max(DECODE_ROWS) else ",".join([f"{first}+1"] * rows)


# ------------------------------------------------------------------------------------------- products


@_measures("linear")
def _linear(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    coded, dense = ("u8", "fp8_block32", "bf16"), ("bf16", "bf16", "f32")
    uses = {
        "attn_in": (m.q_lora + m.head_dim, m.hidden, coded),
        "wq_b": (m.heads * m.head_dim, m.q_lora, coded),
        "wo_b": (m.hidden, m.groups * m.o_lora, coded),
        "indexer.wq_b": (m.index_heads * m.index_dim, m.q_lora, coded),
        "indexer.weights_proj": (m.index_heads, m.hidden, ("bf16", "bf16", "bf16")),
        "compressor": (m.head_dim, m.hidden, dense),
        "gate": (m.experts, m.hidden, dense),
        "shared_gate_up": (2 * m.expert_width, m.hidden, coded),
        "shared_down": (m.hidden, m.expert_width, coded),
        "engram.wkv": ((m.streams + 1) * m.hidden, 3 * m.engram_heads * m.engram_dim, coded),
        "main_proj": (m.hidden, 3 * m.hidden, coded),
        "head": (m.vocab, m.hidden, dense),
    }
    for use, (n, k, (x, w, out)) in uses.items():
        for rows in DECODE_ROWS if use == "head" else _all_rows():
            yield _row(op, rows, use, n * k + rows * (n + k), T=rows, K=k, N=n, x=x, w=w, out=out)


@_measures("grouped_linear")
def _grouped_linear(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    k = m.heads * m.head_dim // m.groups
    for rows in _all_rows():
        sizes = dict(T=rows, G=m.groups, K=k, N=m.o_lora)
        yield _row(op, rows, "wo_a", m.groups * m.o_lora * k, **sizes, x="u8", w="fp8_block32", out="u8")


@_measures("grouped_gemm")
def _grouped_gemm(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for use, n, k in (("gate_up", 2 * m.expert_width, m.hidden), ("down", m.hidden, m.expert_width)):
        for rows in _all_rows():
            sizes = dict(M=rows * m.top_k, E=experts, K=k, N=n)
            yield _row(op, rows, use, experts * n * k, **sizes, x="u8", w="fp4_row32", out="bf16")


@_measures("moe_layer")
def _moe_layer(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    elements = (experts + 1) * 3 * m.hidden * m.expert_width
    top_k = min(m.top_k, experts)
    for rows in _all_rows():
        yield _row(op, rows, "", elements, T=rows, H=m.hidden, E=experts, k=top_k, I=m.expert_width, dtype="bf16", codes=True)


@_measures("confidence_head", "markov_logits")
def _draft_heads(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for rows in DECODE_ROWS:
        if op == "markov_logits":
            elements = 2 * m.vocab * (m.markov_rank + rows)
            yield _row(op, rows, "", elements, R=rows, V=m.vocab, r=m.markov_rank, dtype="bf16")
        else:
            yield _row(op, rows, R=rows, H=m.hidden, r=m.markov_rank, dtype="bf16", temperature=1.5)


# ------------------------------------------------------------------------------------------- input


@_measures("embedding_gather")
def _embedding_gather(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for rows in _all_rows():
        case = Case(op, dict(T=rows, V=m.vocab, H=m.hidden, m=m.streams, w="bf16", out="bf16"))
        table = m.vocab * m.hidden
        yield BenchCase(case, rows, elements=table, gathered=table, coded=False, vary={"ids": m.vocab})


@_measures("engram_lookup")
def _engram_lookup(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for rows in _all_rows():
        case = Case(op, dict(T=rows, C=3 * m.engram_heads, rows=m.engram_rows, d=m.engram_dim, out="u8"))
        table = m.engram_rows * m.engram_dim
        yield BenchCase(case, rows, elements=table, gathered=table, vary={"rows": m.engram_rows})


@_measures("engram_hash", "engram_gate", "gather_tokens", "advance_step")
def _input(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for rows in _all_rows():
        if op == "engram_hash":
            yield _row(op, rows, T=rows, N=4, Q=m.engram_heads, V=m.engram_vocab, released=True)
        elif op == "engram_gate":
            yield _row(op, rows, T=rows, m=m.streams, H=m.hidden, dtype="bf16")
        elif op == "gather_tokens":  # histories of its cases hold 64 tokens
            requests = ",".join(["0+64"] * (rows // 64)) if rows > 64 else ",".join(["40+1"] * rows)
            yield _row(op, rows, requests=requests, N=4)
        else:
            yield _row(op, rows, rows=rows, slots=rows + 8, length=m.context, skip=0)


# ------------------------------------------------------------------------------------------- attention


@_measures("sparse_attention")
def _sparse_attention(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    params = dict(heads=m.heads, D=m.head_dim, block_rows=64, dtype="bf16", window="fp8_32", compressed="fp4_16", storage="ring")
    for use, k in (("window only", 0), ("selected rows", m.topk)):
        for rows in _all_rows():
            stored = rows if rows <= max(DECODE_ROWS) else 1
            keys = stored * (m.context + rows) * m.head_dim if k else 0
            yield _row(op, rows, use, keys, requests=_requests(rows, m.context, m.context), k=k, **params)


@_measures("attention_decode_layer")
def _attention_decode_layer(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    """Its cases have 512 positions, so the last token sees all 512 rows and a full window."""
    wide = m.heads * m.head_dim
    low = m.groups * m.o_lora
    elements = (m.q_lora + m.head_dim + low) * m.hidden + wide * m.q_lora + wide // m.groups * low
    sizes = dict(H=m.hidden, Q=m.q_lora, heads=m.heads, D=m.head_dim, G=m.groups, L=m.o_lora, rope=m.rope, k=m.topk)
    for rows in _all_rows():
        requests = _requests(rows, 511, 511 - rows)
        yield _row(
            op, rows, "", elements, requests=requests, dtype="bf16", codes=True, block_rows=64, window="fp8_32",
            compressed="fp4_16", **sizes,
        )  # fmt: skip


@_measures("draft_attention")
def _draft_attention(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    params = dict(block=m.draft_block, heads=m.heads, D=m.head_dim, dtype="bf16", format="fp8_32", storage="ring")
    for rows in DECODE_ROWS:
        yield _row(op, rows, anchors=",".join([str(m.context)] * rows), **params)


@_measures("score_index")
def _score_index(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    params = dict(heads=m.index_heads, d=m.index_dim, q="mxfp4_32", format="mxfp4_32", block_rows=64, dtype="bf16")
    for use, ratio, pool in (("whole prefix, ratio 2", 2, 0), ("candidate pool", 1, min(m.candidates, m.context // 16))):
        for rows in _all_rows():
            stored = rows if rows <= max(DECODE_ROWS) else 1
            elements = stored * (m.context + rows) * m.index_dim // ratio
            more = {"candidates": pool} if pool else {}
            yield _row(op, rows, use, elements, requests=_requests(rows, m.context, m.context), ratio=ratio, **params, **more)


@_measures("select_topk", "select_candidate_blocks")
def _selection(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for rows in _all_rows():
        if op == "select_topk":
            yield _row(op, rows, rows=rows, columns=m.context, k=m.topk)
        else:
            yield _row(op, rows, rows=rows, columns=m.context, chosen=min(m.candidates, m.context // 16), block=8)


@_measures("compress_kv")
def _compress_kv(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for rows in _all_rows():
        yield _row(op, rows, requests=_requests(rows, m.context + 1, m.context), ratio=2, L=7, D=m.head_dim, dtype="bf16")


@_measures("write_kv")
def _write_kv(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    uses = {
        "window": dict(D=m.head_dim, rope=m.rope, format="fp8_32", block_rows=0, latent=False),
        "compressed": dict(D=m.head_dim, rope=m.rope, format="fp4_16", block_rows=64, latent=True),
        "index": dict(D=m.index_dim, rope=m.rope, format="mxfp4_32", block_rows=64, latent=False),
    }
    for use, params in uses.items():
        for rows in _all_rows():
            yield _row(op, rows, use, rows=rows, dtype="bf16", **params)


@_measures("store_window_kv", "store_compressed_kv", "store_index_k", "store_draft_kv", "load_kv")
def _stores(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    kinds: dict[str, dict[str, Any]] = {
        "store_window_kv": dict(D=m.head_dim, format="fp8_32"),
        "store_compressed_kv": dict(D=m.head_dim, format="fp4_16", block_rows=64),
        "store_index_k": dict(D=m.index_dim, format="mxfp4_32", block_rows=64),
        "store_draft_kv": dict(D=m.head_dim, rope=m.rope, format="fp8_32"),
        "load_kv": dict(D=m.head_dim, format="fp4_16", block_rows=64),
    }
    for rows in DECODE_ROWS if op == "load_kv" else _all_rows():
        moved = rows * m.topk if op == "load_kv" else rows
        yield _row(op, rows, "", moved * m.head_dim, rows=moved, dtype="bf16", **kinds[op])


# ------------------------------------------------------------------------------------------- residual and experts


@_measures("residual_site", "hyper_connection_pre", "hyper_connection_post", "stream_collapse")
def _residual(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    more = {"codes": True} if op == "residual_site" else {}
    for rows in _all_rows():
        yield _row(op, rows, T=rows, m=m.streams, H=m.hidden, dtype="bf16", **more)


@_measures("draft_features")
def _draft_features(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for rows in _all_rows():
        yield _row(op, rows, rows=rows, m=m.streams, H=m.hidden, dtype="bf16", padding=2 * m.hidden)


@_measures("rms_norm", "rope", "quantise", "dequantise", "swiglu_quantise")
def _rows_of_values(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    wide = m.heads * m.head_dim
    for rows in _all_rows():
        if op == "rms_norm":
            for use, n in (("attn_norm", m.hidden), ("q_norm", m.q_lora)):
                yield _row(op, rows, use, T=rows, N=n, x="bf16", out="bf16", codes=True)
        elif op == "rope":
            yield _row(op, rows, "query", T=rows, h=m.heads, D=m.head_dim, r=m.rope, dtype="bf16", inverse=False)
        elif op == "swiglu_quantise":
            pairs = rows * m.top_k
            yield _row(op, rows, M=pairs, I=m.expert_width, x="bf16", out="u8", weighed=True, rows=pairs)
        else:
            yield _row(op, rows, "attention output", T=rows, N=wide, format="fp8_32", dtype="bf16")


@_measures("route_topk", "permute", "unpermute", "ep_dispatch", "ep_combine")
def _experts(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    kinds: dict[str, dict[str, Any]] = {
        "route_topk": dict(E=m.experts, k=m.top_k),
        "permute": dict(K=m.hidden, E=m.experts, k=m.top_k, x="u8"),
        "unpermute": dict(H=m.hidden, k=m.top_k, dtype="bf16", shared=True),
        "ep_dispatch": dict(K=m.hidden, E=m.experts, k=m.top_k, x="u8", weights=True),
        "ep_combine": dict(H=m.hidden, k=m.top_k, dtype="bf16", weights=True, shared=True),
    }
    use = "one rank" if op.startswith("ep_") else ""
    for rows in _all_rows():
        yield _row(op, rows, use, T=rows, **kinds[op])


# ------------------------------------------------------------------------------------------- sampling and state


@_measures("mask_logits", "sample", "top_logprobs", "nan_row_flags", "verify_drafts", "plan_verify_lengths")
def _sampling(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    for rows in DECODE_ROWS:
        logits = rows * m.vocab
        if op == "mask_logits":
            for mode in ("penalties", "all"):
                yield _row(op, rows, mode, logits, S=rows, V=m.vocab, L=m.context, mode=mode)
        elif op == "sample":
            for mode in ("greedy", "plain", "filtered"):
                yield _row(op, rows, mode, logits, S=rows, V=m.vocab, mode=mode, purpose=0)
        elif op == "top_logprobs":
            yield _row(op, rows, "", logits, S=rows, V=m.vocab, k=20)
        elif op == "nan_row_flags":
            yield _row(op, rows, "", logits, S=rows, V=m.vocab)
        elif op == "verify_drafts":
            for rule in ("coupled", "rejection"):
                drawn = 2 * logits * (m.draft_block + 1)
                yield _row(op, rows, rule, drawn, R=rows, B=m.draft_block, V=m.vocab, rule=rule)
        else:
            yield _row(op, rows, R=rows, B=m.draft_block, M=rows * (m.draft_block + 1) + 1, cost="steps")


@_measures("copy_rows", "copy_blocks", "snapshot_state")
def _copies(op: str, m: ModelShapes, experts: int) -> Iterator[BenchCase]:
    """Window rows; compressed blocks of 64 rows; carry rings of 7 tokens."""
    if op == "copy_rows":
        for rows in (1, 16, 48):
            yield _row(op, rows, "window", rows=rows, bytes=m.head_dim + m.head_dim // 32, skip=0)
        return
    size = 64 * (m.head_dim // 2 + m.head_dim // 16) if op == "copy_blocks" else 7 * 2 * 4 * m.head_dim
    for rows in _PAIR_ROWS:
        yield _row(op, rows, rows=rows, bytes=size, skip=0)
