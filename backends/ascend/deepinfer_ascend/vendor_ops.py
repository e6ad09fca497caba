"""What the NPU device may ask of torch_npu: runtime calls, and the few vendor ops that could serve a card.

A vendor op is mapped only where its documented formula is the card's; how it still differs is listed with it, and it
stays off until a stored report or `deepinfer hal prove` shows it right for exactly that SoC, CANN and torch_npu. The
others that look as if they fit are named with the reason why they do not. State: `written`;
`tools/ascend/check_torch_npu.py` holds every call here against torch_npu's registered schemas and meta kernels, which
says nothing of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

OFF_UNTIL_PROVEN = "off: not proven for this SoC, CANN and torch_npu; run `deepinfer hal prove`"


@dataclass(frozen=True)
class RuntimeCall:
    """A call of torch_npu's runtime: dotted path, the arguments it is made with (names, or positions as "_"), and
    why.
    """

    path: str
    arguments: tuple[str, ...]
    why: str


RUNTIME_CALLS = (
    RuntimeCall("torch_npu.npu.is_available", (), "probe"),
    RuntimeCall("torch_npu.npu.device_count", (), "probe"),
    RuntimeCall("torch_npu.npu.get_device_name", ("device_name",), "the SoC that kernels and proofs are for"),
    RuntimeCall("torch_npu.npu.get_device_properties", ("device_name",), "memory and cores of a device"),
    RuntimeCall("torch_npu.npu.set_device", ("device",), "one device a rank"),
    RuntimeCall("torch_npu.npu.mem_get_info", ("device",), "free and total bytes; they vary by SKU, so never assumed"),
    RuntimeCall("torch_npu.npu.memory_reserved", ("device",), "what the allocator holds, for the memory plan"),
    RuntimeCall("torch_npu.npu.max_memory_allocated", ("device",), "peak bytes for reports"),
    RuntimeCall("torch_npu.npu.reset_peak_memory_stats", ("device",), "peak bytes for reports"),
    RuntimeCall("torch_npu.npu.empty_cache", (), "memory is given back after loading"),
    RuntimeCall("torch_npu.npu.synchronize", ("device",), "the end of a measurement; never inside a step"),
    RuntimeCall("torch_npu.npu.Stream", ("device", "priority"), "stream slot"),
    RuntimeCall("torch_npu.npu.stream", ("stream",), "launches on a stream"),
    RuntimeCall("torch_npu.npu.current_stream", ("device",), "the stream handed to the C ABI"),
    RuntimeCall("torch_npu.npu.Stream.wait_event", ("_", "event"), "order between streams"),
    RuntimeCall("torch_npu.npu.Stream.synchronize", ("_",), "settle waits for its copy alone"),
    RuntimeCall("torch_npu.npu.Event", ("enable_timing",), "event slot; timing for the benchmark timer"),
    RuntimeCall("torch_npu.npu.Event.record", ("_", "stream"), "event slot"),
    RuntimeCall("torch_npu.npu.Event.wait", ("_", "stream"), "event slot"),
    RuntimeCall("torch_npu.npu.Event.query", ("_",), "bounded waits poll, so that a dead device is noticed"),
    RuntimeCall("torch_npu.npu.Event.elapsed_time", ("_", "end_event"), "timer slot"),
    RuntimeCall("torch_npu.npu.NPUGraph", (), "graphs slot"),
    RuntimeCall("torch_npu.npu.graph", ("npu_graph", "pool", "stream"), "capture of a step"),
    RuntimeCall(
        "torch_npu.npu.graph_pool_handle", (), "graphs of all sizes share one pool, which the memory plan counts"
    ),
    RuntimeCall("torch_npu.npu.NPUGraph.replay", ("_",), "graphs slot"),
    RuntimeCall("torch_npu.npu.NPUGraph.reset", ("_",), "graphs slot"),
    RuntimeCall("torch.Tensor.copy_", ("_", "src", "non_blocking"), "copies between pinned host memory and the device"),
    RuntimeCall("torch.Tensor.pin_memory", ("_",), "pinned host memory"),
)


@dataclass(frozen=True)
class Expected:
    """What an argument or a result of a vendor op is: allowed dtypes, and dimensions as names or expressions of
    names.
    """

    dtypes: tuple[torch.dtype, ...]
    dims: tuple[str, ...]


@dataclass(frozen=True)
class VendorOp:
    """A vendor op in place of a card's kernel. `call` takes the card's arguments in order; `inputs` and `results` say
    what the op is called with and gives; `differences`: every way in which it is not the card.
    """

    card: str
    name: str
    call: Callable[..., None]
    inputs: Mapping[str, Expected]
    results: tuple[Expected, ...]
    differences: tuple[str, ...]


_BF16, _F32, _I32, _I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
_DENSE = (_BF16, _F32)


def rms_norm(x, weight, eps, count, out, out_codes=None, out_scales=None) -> None:
    """The card's rms_norm without codes; every row is computed, whatever the count."""
    out.copy_(torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0])


def hyper_connection_post(y, post, comb, count, streams) -> None:
    """The card's hyper_connection_post; every row is computed, whatever the count."""
    streams.copy_(torch.ops.npu.npu_mhc_post(streams, comb, y, post))


def permute(x, x_scale, ids, experts, count, out, out_scale, offsets, source, inverse) -> None:
    """The card's permute of dense rows in which every id is an expert."""
    rows, k = ids.shape
    expanded, places, ends, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x, ids, active_num=rows * k, expert_num=experts, expert_tokens_num_type=0, expert_tokens_num_flag=True,
        active_expert_range=[0, experts], quant_mode=-1, row_idx_type=0,
    )  # fmt: skip
    out.copy_(expanded)
    offsets[:1].zero_()
    offsets[1:].copy_(ends)
    inverse.copy_(places.view(rows, k))
    order = torch.arange(rows * k, dtype=source.dtype, device=source.device)
    source.scatter_(0, places.long(), order)


def unpermute(rows, inverse, shared, count, out) -> None:
    """The card's unpermute when every choice has a row; the shared expert is added after a rounding of its own."""
    ones = torch.ones(inverse.shape, dtype=rows.dtype, device=rows.device)
    out.copy_(torch.ops.npu.npu_moe_token_unpermute(rows, inverse.view(-1), ones))
    if shared is not None:
        out.add_(shared)


_NO_COUNT = "the device count is not honoured: rows past it are written"

VENDOR_OPS = (
    VendorOp(
        "rms_norm", "npu_rms_norm", rms_norm,
        {"input": Expected(_DENSE, ("T", "N")), "gamma": Expected(_DENSE, ("N",))},
        (Expected(_DENSE, ("T", "N")), Expected((_F32,), ("T", "1"))),
        (
            _NO_COUNT,
            "no codes: a quantise call must follow",
            "whether x * rsqrt is rounded to BF16 before gamma multiplies is not documented; the card rounds once",
            "an epsilon of 1e-20 may be lost if the mean is not FP32",
            "the order of the sum is not documented, so batch invariance is unknown",
        ),
    ),
    VendorOp(
        "hyper_connection_post", "npu_mhc_post", hyper_connection_post,
        {
            "x": Expected((_BF16,), ("T", "m", "H")), "h_res": Expected((_F32,), ("T", "m", "m")),
            "h_out": Expected((_BF16,), ("T", "H")), "h_post": Expected((_F32,), ("T", "m")),
        },
        (Expected((_BF16,), ("T", "m", "H")),),
        (
            _NO_COUNT,
            "BF16 streams alone",
            "which index of h_res is summed is not documented; the card sums over the first",
            "not in place: one more copy of the streams",
        ),
    ),
    VendorOp(
        "permute", "npu_moe_init_routing_v2", permute,
        {"x": Expected(_DENSE, ("T", "K")), "expert_idx": Expected((_I32,), ("T", "k"))},
        (
            Expected(_DENSE, ("T*k", "K")), Expected((_I32,), ("T*k",)), Expected((_I64,), ("experts",)),
            Expected((_F32,), ("T*k",)),
        ),
        (
            _NO_COUNT,
            "an id of -1 is not allowed by the document; the card gives it no row",
            "codes with scales do not go through: dense rows alone",
            "stability of the sort for equal experts is not documented",
            "source must be made from expanded_row_idx by a scatter",
        ),
    ),
    VendorOp(
        "unpermute", "npu_moe_token_unpermute", unpermute,
        {
            "permuted_tokens": Expected(_DENSE, ("T*k", "H")), "sorted_indices": Expected((_I32,), ("T*k",)),
            "probs": Expected(_DENSE, ("T", "k")),
        },
        (Expected(_DENSE, ("T", "H")),),
        (
            _NO_COUNT,
            "a choice without a row (inverse -1) is not allowed",
            "the shared expert is added after the sum was rounded to BF16: two roundings, the card has one",
            "the order and precision of the sum over k are not documented",
        ),
    ),
)  # fmt: skip
"""At most six are mapped; none is on by default."""

UNFIT = {
    "npu_moe_gating_top_k": "route_topk: its scores are softmax or sigmoid by the document, the card's sqrt(softplus)",
    "npu_dynamic_mx_quant": "quantise: no document says how it chooses scales (scale_alg), the card's are defined on "
    "bits; scales lie as [.., K/64, 2]",
    "npu_mhc_pre": "hyper_connection_pre: it takes no coefficients of the site before, with which the card mixes",
    "npu_mhc_sinkhorn": "hyper_connection_pre: its meta kernel fails, so nothing about the call can be checked",
    "npu_clipped_swiglu": "swiglu_quantise: another formula (alpha, bias) over interleaved columns, no routing weight",
    "npu_swiglu_mx_quant": "swiglu_quantise: no routing weight before the quantisation; scales as there",
    "npu_quant_matmul": "linear: a scale for every weight row and 32 of K; 32 x 32 scales would be copied 32 times",
    "npu_grouped_matmul": "grouped_gemm: its document names A2 and A3 alone, and no FP8 rows with FP4 weights",
    "npu_interleave_rope": "rope: heads of exactly 64 dims, no partial rotation in place, no inverse",
    "npu_lightning_indexer": "score_index: gives the selected rows and no scores; FP4 keys are not among its formats",
    "npu_quant_lightning_indexer": "score_index: gives the selected rows and no scores; FP8 or INT8 keys",
    "npu_sparse_flash_attention": "sparse_attention: one cache, no window ring beside the selection, no quantised rows",
    "npu_kv_quant_sparse_flash_attention": "sparse_attention: no sink in this release, one cache, a scale per 128",
    "npu_moe_finalize_routing": "unpermute: wants scales and a source-row tensor that the card has not",
}
"""Vendor ops that look like a card and are not offered, with the reason."""
