"""What torch has of its own for a card's call, to be timed beside the kernel that serves it.

No operator of torch makes codes with block scales, so most stand for a part of the op: `what` names the operators, and says what
they leave out. An op for which torch has no operator but a chain of small ones has no entry. What a call reads is made before:
decoded keys, gathered rows, int64 indices, contiguous copies; bytes are moved as words. Where several ways were timed, on an H200
with torch 2.11, the fastest stands here or one within some percent of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from graph_timing import microseconds

Args = Mapping[str, Any]
"""A call's arguments by the card's names."""


class TorchCall(NamedTuple):
    """Operators of torch in words, and what runs them on one call's tensors."""

    what: str
    call: Callable[[], Any]


def torchs_own(op: str, args: Args) -> TorchCall | None:
    """torch's operators for this call of a card; None where it has none."""
    maker = _MAKERS.get(op)
    return maker(args) if maker else None


def torch_row(calls: Iterable[TorchCall | None], samples: int) -> dict[str, Any]:
    """`torch` and `torch_us` of a report's row: the words and the median microseconds of a call, of a graph over all of them."""
    made = [one for one in calls if one is not None]
    if not made:
        return {"torch": None, "torch_us": None}

    def run() -> None:
        for one in made:
            one.call()

    return {"torch": made[0].what, "torch_us": microseconds(run, samples) / len(made)}


def beside(row: Mapping[str, Any]) -> str:
    """What torch_row found, for the end of a line; empty where it was not asked or torch has nothing."""
    return f"  torch {row['torch_us']:.2f} us ({row['torch']})" if row.get("torch") else ""


def attention(q: torch.Tensor, keys: torch.Tensor) -> list[TorchCall]:
    """Attention of q [T, h, D] over gathered keys [T, K, D] that are values too, without a sink: by two products and a softmax,
    and by torch's fused operator. Products are slow where keys are no multiple of eight, so some of no weight fill them up."""
    scale, count = q.shape[-1] ** -0.5, keys.shape[1]
    wide = F.pad(keys, (0, 0, 0, -count % 8)) if count % 8 else keys
    bias = torch.zeros(1, 1, wide.shape[1], dtype=q.dtype, device=q.device)
    bias[..., count:] = float("-inf")

    def products() -> torch.Tensor:
        scores = torch.baddbmm(bias, q, wide.transpose(1, 2), beta=int(count % 8 != 0), alpha=scale)
        return torch.bmm(torch.softmax(scores, dim=-1), wide)

    def fused() -> torch.Tensor:
        one_head = keys[:, None]
        return F.scaled_dot_product_attention(q[:, None], one_head, one_head, scale=scale)[:, 0]

    left_out = "over decoded rows gathered beforehand, no sink"
    return [
        TorchCall(f"baddbmm, softmax, bmm {left_out}", products),
        TorchCall(f"scaled_dot_product_attention {left_out}", fused),
    ]


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, most_rows: int = 512) -> TorchCall:
    """Scores of q [T, h, d] with weights [T, h] over decoded keys [T, K, d], or [1, K, d] that all rows share: [T, K], in parts
    of `most_rows` rows. Keys that all rows share have a product that ends in the relu."""
    zero = torch.zeros(keys.shape[1], dtype=q.dtype, device=q.device)

    def part(some: slice) -> torch.Tensor:
        query, weight = q[some], weights[some, None]
        if keys.shape[0] == 1:
            products = torch._addmm_activation(zero, query.flatten(0, 1), keys[0].t()).view(*query.shape[:2], -1)
        else:
            products = torch.bmm(query, keys[some].transpose(1, 2)).relu_()
        return torch.bmm(weight, products)[:, 0]

    def call() -> torch.Tensor:
        parts = [part(slice(first, first + most_rows)) for first in range(0, q.shape[0], most_rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return TorchCall("product, relu and product with the weights in BF16, over keys decoded beforehand", call)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """uint8 rows [N, bytes] as int64, which index operators move faster where rows are long; as bytes where that does not go."""
    return rows.view(torch.int64) if rows.shape[-1] % 8 == 0 and rows.is_contiguous() else rows


def _rms_norm(a: Args) -> TorchCall:
    x = a["x"].contiguous()
    return TorchCall("rms_norm, no codes", lambda: F.rms_norm(x, a["weight"].shape, a["weight"], a["eps"]))


def _quantise(a: Args) -> TorchCall | None:
    if a["format"] != "fp8_32":
        return None
    return TorchCall("cast to e4m3, no scales", lambda: a["x"].to(torch.float8_e4m3fn))


def _route_topk(a: Args) -> TorchCall:
    return TorchCall("topk of the logits, no weights and counts", lambda: torch.topk(a["logits"], a["k"]))


def _permute(a: Args) -> TorchCall:
    x, choices = _words(a["x"]), a["ids"].flatten()
    k = a["ids"].shape[1]

    def call() -> torch.Tensor:
        return x.index_select(0, choices.argsort(stable=True) // k).view(torch.uint8)

    return TorchCall("argsort and index_select of codes, no scales, offsets and inverse", call)


def _swiglu_quantise(a: Args) -> TorchCall:
    gate, up = a["gate_up"].chunk(2, dim=1)
    return TorchCall("silu and mul, no clamp, weights and codes", lambda: F.silu(gate) * up)


def _unpermute(a: Args) -> TorchCall:
    rows, inverse, shared = a["rows"], a["inverse"].long().flatten(), a["shared"]
    of_tokens = (*a["inverse"].shape, rows.shape[1])
    return TorchCall("index_select, sum and add_", lambda: rows.index_select(0, inverse).view(of_tokens).sum(1).add_(shared))


def _engram_lookup(a: Args) -> TorchCall:
    codes, rows = _words(a["table"].canonical().values), a["rows"].flatten()
    return TorchCall("index_select of codes, no scales", lambda: codes.index_select(0, rows).view(torch.uint8))


def _sample(a: Args) -> TorchCall:
    """All rows take the settings of the first. Noise is added to logits where nothing is left out of the softmax."""
    logits = a["logits"]
    temperature, top_k, top_p, min_p = (float(a[name][0]) for name in ("temperature", "top_k", "top_p", "min_p"))
    if temperature == 0:
        return TorchCall("argmax", lambda: logits.argmax(1))

    def noisy(values: torch.Tensor) -> torch.Tensor:
        heated = values if temperature == 1 else values / temperature
        return (heated - torch.empty_like(values).exponential_().log_()).argmax(1, keepdim=True)

    def call() -> torch.Tensor:
        if not top_k and top_p == 1 and not min_p:
            return noisy(logits)[:, 0]
        ordered = top_p < 1 or bool(min_p)
        if top_k:
            values, ids = torch.topk(logits, int(top_k), sorted=ordered)
        else:
            values, ids = torch.sort(logits, dim=1, descending=True)
        if ordered:
            p = torch.softmax(values if temperature == 1 else values / temperature, dim=1)
            out = p < min_p * p[:, :1] if min_p else torch.zeros_like(p, dtype=torch.bool)
            if top_p < 1:
                out |= p.cumsum(1) - p >= top_p
            values = values.masked_fill(out, float("-inf"))
        return ids.gather(1, noisy(values))[:, 0]

    chosen = "topk, " if top_k else "sort, " if top_p < 1 or min_p else ""
    kept = ("softmax, " if top_p < 1 or min_p else "") + ("cumsum, " if top_p < 1 else "")
    kept += "masked_fill, " if kept else ""
    return TorchCall(f"{chosen}{kept}exponential_, log_, sub, argmax", call)


def _nan_row_flags(a: Args) -> TorchCall:
    return TorchCall("amax and isfinite", lambda: ~a["logits"].amax(1).isfinite())


def _top_logprobs(a: Args) -> TorchCall:
    count = a["ids"].shape[1]
    return TorchCall("log_softmax and topk, no rank", lambda: torch.topk(torch.log_softmax(a["logits"], 1), count))


def _mask_logits(a: Args) -> TorchCall | None:
    """Allowed tokens alone: torch has nothing for penalties."""
    if a["allowed"] is None:
        return None
    logits, bit = a["logits"], torch.arange(32, device=a["logits"].device)
    refused = (a["allowed"][:, :, None] >> bit & 1 == 0).flatten(1)[:, : logits.shape[1]]
    return TorchCall("masked_fill_ by a mask of bytes", lambda: logits.masked_fill_(refused, float("-inf")))


def _draft_features(a: Args) -> TorchCall:
    return TorchCall("mean", lambda: a["streams"].mean(1))


def _markov_logits(a: Args) -> TorchCall:
    embed, head, prev = a["embed"].canonical().values, a["head"].canonical().values.t(), a["prev"].long()

    def call() -> torch.Tensor:
        if a["base"].is_cuda:
            return torch.addmm(a["base"], F.embedding(prev, embed), head, out_dtype=a["base"].dtype)
        return a["base"] + F.embedding(prev, embed) @ head  # on the host torch has no product of two dtypes

    return TorchCall("embedding and addmm", call)


def _confidence_head(a: Args) -> TorchCall:
    def call() -> torch.Tensor:
        return torch.sigmoid(F.linear(torch.cat((a["raw"], a["mu"]), 1), a["weight"])[:, 0] / a["temperature"])

    return TorchCall("cat, linear, div and sigmoid", call)


def _draft_attention(a: Args) -> TorchCall:
    rows, width = a["anchor"].shape[0], a["q"].shape[-1]
    keys = torch.randn(rows, a["window_tokens"] + a["draft_block"], width, device=a["q"].device).to(a["q"].dtype)
    return attention(a["q"].view(rows, -1, width), keys)[0]


def _gather_tokens(a: Args) -> TorchCall:
    slots, positions = a["slots"].long()[a["row_to_req"].long()], a["positions"].long()
    return TorchCall("index by slots looked up beforehand, no n-grams", lambda: a["history"][slots, positions])


def _copy(store: str, to: str, from_store: str, at: str) -> Callable[[Args], TorchCall]:
    def make(a: Args) -> TorchCall:
        rows, found, into, out_of = a[to].long(), a[at].long(), _words(a[store]), _words(a[from_store])

        def call() -> torch.Tensor:
            into[rows] = out_of[found]
            return into.view(torch.uint8)

        return TorchCall("index and index_put_ of words", call)

    return make


_MAKERS: dict[str, Callable[[Args], TorchCall | None]] = {
    "rms_norm": _rms_norm, "quantise": _quantise, "route_topk": _route_topk, "permute": _permute,
    "swiglu_quantise": _swiglu_quantise, "unpermute": _unpermute, "engram_lookup": _engram_lookup, "sample": _sample,
    "nan_row_flags": _nan_row_flags, "top_logprobs": _top_logprobs, "mask_logits": _mask_logits,
    "draft_features": _draft_features, "markov_logits": _markov_logits, "confidence_head": _confidence_head,
    "draft_attention": _draft_attention, "gather_tokens": _gather_tokens,
    "copy_rows": _copy("dst", "dst_rows", "src", "src_rows"), "copy_blocks": _copy("cache", "dst", "cache", "src"),
    "snapshot_state": _copy("state", "dst", "state", "src"),
}  # fmt: skip
