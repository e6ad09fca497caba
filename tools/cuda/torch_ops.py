"""What torch has of its own for a card's call, to be timed beside the kernel that serves it.

No operator of torch makes codes with block scales or reads them, so most stand for a part of the op: `what` names the operators,
and says what they leave out. An op for which torch has no operator but a chain of small ones has no entry. What a call reads is
made before: decoded keys, gathered rows, int64 indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from graph_timing import microseconds_of_a_call

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
    return {"torch": made[0].what, "torch_us": microseconds_of_a_call([one.call for one in made], samples, discarded=1)}


def beside(row: Mapping[str, Any]) -> str:
    """What torch_row found, for the end of a line; empty where it was not asked or torch has nothing."""
    return f"  torch {row['torch_us']:.2f} us ({row['torch']})" if row.get("torch") else ""


def attention(q: torch.Tensor, keys: torch.Tensor) -> list[TorchCall]:
    """Attention of q [T, h, D] over gathered keys [T, K, D] that are values too, without a sink: by two products and a softmax,
    and by torch's fused operator."""
    scale = q.shape[-1] ** -0.5

    def products() -> torch.Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, keys.transpose(1, 2)).float() * scale, dim=-1).to(keys.dtype), keys)

    def fused() -> torch.Tensor:
        one_head = keys[:, None]
        return F.scaled_dot_product_attention(q[:, None], one_head, one_head, scale=scale)[:, 0]

    left_out = "over decoded rows gathered beforehand, no sink"
    return [
        TorchCall(f"bmm, softmax, bmm {left_out}", products),
        TorchCall(f"scaled_dot_product_attention {left_out}", fused),
    ]


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, most_rows: int = 512) -> TorchCall:
    """Scores of q [T, h, d] with weights [T, h] over decoded keys [T, K, d], or [1, K, d] that all rows share: [T, K], in parts
    of `most_rows` rows."""

    def part(some: slice) -> torch.Tensor:
        query, weight = q[some], weights[some, None]
        if keys.shape[0] == 1:
            products = torch.mm(query.flatten(0, 1), keys[0].t()).view(*query.shape[:2], -1)
        else:
            products = torch.bmm(query, keys[some].transpose(1, 2))
        return torch.bmm(weight, products.relu_())[:, 0]

    def call() -> torch.Tensor:
        parts = [part(slice(first, first + most_rows)) for first in range(0, q.shape[0], most_rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return TorchCall("product, relu and product with the weights in BF16, over keys decoded beforehand", call)


def _rms_norm(a: Args) -> TorchCall:
    return TorchCall("rms_norm, no codes", lambda: F.rms_norm(a["x"], a["weight"].shape, a["weight"], a["eps"]))


def _quantise(a: Args) -> TorchCall | None:
    if a["format"] != "fp8_32":
        return None
    return TorchCall("cast to e4m3, no scales", lambda: a["x"].to(torch.float8_e4m3fn))


def _route_topk(a: Args) -> TorchCall:
    return TorchCall("topk of the logits, no weights and counts", lambda: torch.topk(a["logits"], a["k"]))


def _permute(a: Args) -> TorchCall:
    x, choices = a["x"], a["ids"].flatten()
    k = a["ids"].shape[1]

    def call() -> torch.Tensor:
        return x.index_select(0, choices.argsort(stable=True) // k)

    return TorchCall("argsort and index_select of codes, no scales, offsets and inverse", call)


def _swiglu_quantise(a: Args) -> TorchCall:
    gate, up = a["gate_up"].chunk(2, dim=1)
    return TorchCall("silu and mul, no clamp, weights and codes", lambda: F.silu(gate) * up)


def _unpermute(a: Args) -> TorchCall:
    rows, inverse, shared = a["rows"], a["inverse"].long(), a["shared"]
    return TorchCall("embedding_bag and add", lambda: F.embedding_bag(inverse, rows, mode="sum") + shared)


def _engram_lookup(a: Args) -> TorchCall:
    codes, rows = a["table"].canonical().values, a["rows"].flatten()
    return TorchCall("index_select of codes, no scales", lambda: codes.index_select(0, rows))


def _sample(a: Args) -> TorchCall:
    """All rows take the settings of the first."""
    logits = a["logits"]
    temperature, top_k, top_p, min_p = (float(a[name][0]) for name in ("temperature", "top_k", "top_p", "min_p"))
    if temperature == 0:
        return TorchCall("argmax", lambda: logits.argmax(1))

    def call() -> torch.Tensor:
        values, ids = logits, None
        if top_k:
            values, ids = torch.topk(logits, int(top_k))
        elif top_p < 1 or min_p:
            values, ids = torch.sort(logits, dim=1, descending=True)
        p = torch.softmax(values / temperature, dim=1)
        if top_p < 1:
            p = p.masked_fill(p.cumsum(1) - p >= top_p, 0)
        if min_p:
            p = p.masked_fill(p < min_p * p[:, :1], 0)
        drawn = (p / torch.empty_like(p).exponential_()).argmax(1, keepdim=True)
        return drawn[:, 0] if ids is None else ids.gather(1, drawn)[:, 0]

    chosen = "topk, " if top_k else "sort, " if top_p < 1 or min_p else ""
    kept = ("cumsum, masked_fill, " if top_p < 1 else "") + ("masked_fill, " if min_p else "")
    return TorchCall(f"{chosen}softmax, {kept}exponential_, argmax", call)


def _nan_row_flags(a: Args) -> TorchCall:
    return TorchCall("isnan and any", lambda: a["logits"].isnan().any(1))


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
    return TorchCall("embedding, mm and add", lambda: a["base"] + F.embedding(prev, embed) @ head)


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
    return TorchCall("index, no n-grams", lambda: a["history"][slots, positions])


def _copy(store: str, to: str, from_store: str, at: str) -> Callable[[Args], TorchCall]:
    def make(a: Args) -> TorchCall:
        rows, found, into, out_of = a[to].long(), a[at].long(), a[store], a[from_store]
        return TorchCall("index_select and index_copy_", lambda: into.index_copy_(0, rows, out_of.index_select(0, found)))

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
