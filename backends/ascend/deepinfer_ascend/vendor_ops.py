"""The few ops of torch_npu that could serve a card, and those that look as if they could.

A vendor op is mapped only where its documented formula is the card's; how it still differs is listed with it, and it
stays off until `deepinfer hal prove` shows it right for exactly that SoC, CANN and torch_npu. The others are named with
the reason why they do not fit. State: `written`; `tools/ascend/check_torch_npu.py` holds every call here against
torch_npu's registered schemas and meta kernels, which says nothing of values. docs/ascend-vendor-ops.md is the same for
readers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes
from deepinfer_hal.ops._common import write_result

OFF_UNTIL_PROVEN = "off until `deepinfer hal prove` shows them right for this SoC, CANN and torch_npu"
PRIORITY = 50
"""Below this project's own kernels: a vendor op serves where those are not built."""


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
    what the op is called with and gives; `differences`: every way in which it is not the card. `refuses`: why a call of
    these statics is not served, or None.
    """

    card: str
    name: str
    call: Callable[..., None]
    inputs: Mapping[str, Expected]
    results: tuple[Expected, ...]
    differences: tuple[str, ...]
    refuses: Callable[[Mapping[str, object]], str | None] = lambda statics: None

    def answer(self, call: CallSpec) -> Yes | No:
        """Yes, unless what is known of the call, or is not known of it, goes beyond the vendor op."""
        doubles = [name for name, value in call.statics.items() if value == "f64"]
        reason = f"{doubles[0]} is float64" if doubles else self.refuses(call.statics)
        return Yes() if reason is None else No(f"{self.name}: {reason}")


_BF16, _F32, _I32, _I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
_DENSE = (_BF16, _F32)


def _keep(out: torch.Tensor, value: torch.Tensor, count: torch.Tensor | None) -> None:
    """Rounds `value` into the rows of `out` that count; the vendor's ops know no count on the device. Rows past it stay."""
    if count is None:
        out.copy_(value)
        return
    rows = torch.arange(out.shape[0], device=out.device).view(-1, *[1] * (out.dim() - 1))
    out.copy_(torch.where(rows < count, value.to(out.dtype), out))


def rms_norm(x, weight, eps, count, out, out_codes=None, out_scales=None) -> None:
    """The card's rms_norm; codes are made by torch from the rounded rows."""
    if x.dtype != weight.dtype or (out is not None and out.dtype != x.dtype):
        y = torch.ops.npu.npu_rms_norm(x.float(), weight.float(), epsilon=eps)[0]
    else:
        y = torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    if out is not None:
        _keep(out, y, count)
    if out_codes is not None:
        codes, scales = torch.empty_like(out_codes), torch.empty_like(out_scales)
        write_result(codes, scales, y.to(x.dtype if out is None else out.dtype))
        _keep(out_codes, codes, count)
        _keep(out_scales, scales, count)


def hyper_connection_post(y, post, comb, count, streams) -> None:
    """The card's hyper_connection_post over BF16 streams."""
    _keep(streams, torch.ops.npu.npu_mhc_post(streams, comb, y, post), count)


def permute(x, x_scale, ids, experts, count, out, out_scale, offsets, source, inverse) -> None:
    """The card's permute of dense rows in which every id is an expert and every row counts."""
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
    """The card's unpermute; a choice without a row weighs nothing, and the shared expert is added after a rounding."""
    there = inverse >= 0
    places = torch.where(there, inverse, 0).view(-1)
    total = torch.ops.npu.npu_moe_token_unpermute(rows, places, there.to(rows.dtype))
    _keep(out, total if shared is None else total + shared, count)


def _no_permute(statics: Mapping[str, object]) -> str | None:
    if "x_scale" not in statics or "count" not in statics:
        return "whether codes with scales, or a device count, come with the call is not known"
    if statics["x_scale"] is not None:
        return "codes with scales do not go through it"
    return None if statics["count"] is None else "it does not honour a device count"


def _no_post(statics: Mapping[str, object]) -> str | None:
    return None if statics.get("streams") == "bf16" else "it serves BF16 streams alone"


_COUNT = "no device count: every row is computed, and those past the count are dropped by torch"

VENDOR_OPS = (
    VendorOp(
        "rms_norm", "npu_rms_norm", rms_norm,
        {"input": Expected(_DENSE, ("T", "N")), "gamma": Expected(_DENSE, ("N",))},
        (Expected(_DENSE, ("T", "N")), Expected((_F32,), ("T", "1"))),
        (
            _COUNT,
            "no codes: torch makes them from the rounded rows, in some ten launches",
            "x and weight of two dtypes are widened first",
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
            _COUNT,
            "BF16 streams alone",
            "which index of h_res is summed is not documented; the card sums over the first",
            "not in place: one more copy of the streams",
        ),
        _no_post,
    ),
    VendorOp(
        "permute", "npu_moe_init_routing_v2", permute,
        {"x": Expected(_DENSE, ("T", "K")), "expert_idx": Expected((_I32,), ("T", "k"))},
        (
            Expected(_DENSE, ("T*k", "K")), Expected((_I32,), ("T*k",)), Expected((_I64,), ("experts",)),
            Expected((_F32,), ("T*k",)),
        ),
        (
            "a call with a device count is refused",
            "an id of -1 is not allowed by the document; the card gives it no row",
            "codes with scales do not go through: dense rows alone",
            "stability of the sort for equal experts is not documented",
            "source must be made from expanded_row_idx by a scatter",
        ),
        _no_permute,
    ),
    VendorOp(
        "unpermute", "npu_moe_token_unpermute", unpermute,
        {
            "permuted_tokens": Expected(_DENSE, ("T*k", "H")), "sorted_indices": Expected((_I32,), ("T*k",)),
            "probs": Expected(_DENSE, ("T", "k")),
        },
        (Expected(_DENSE, ("T", "H")),),
        (
            _COUNT,
            "a choice without a row (inverse -1) is not allowed: it is sent to row 0 with weight 0, so a NaN there spreads",
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


def kernels() -> list[Kernel]:
    """The mapped ops as candidates: capturable none (they allocate), batch invariance unknown."""
    return [
        Kernel(op.card, "torch_npu", op.call, f"npu::{op.name}", "unknown", priority=PRIORITY, supports=op.answer)
        for op in VENDOR_OPS
    ]


def digest() -> str:
    """Of this file: a proof holds for the mapping that was proven."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
