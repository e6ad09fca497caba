"""Attention and the carry of compressed groups: sinks, windows, rings, pages, order of keys, chunks."""

from __future__ import annotations

import torch
from deepinfer_hal.card import get_card
from deepinfer_hal.ops import _attention, compress_kv

from tests.conformance.mutants import right
from tests.conformance.mutants._base import Args, Mutant, changed, kernel, patched

_SIZES = "heads=2,D=64,k=64,block_rows=16,dtype=f32,window=fp8_32,compressed=fp4_16"
RING = f"sparse_attention(requests=140+2,3+1,{_SIZES},storage=ring)"
ALONE = f"sparse_attention(requests=140+1,3+1,{_SIZES},storage=ring)"
COUNTED = f"sparse_attention(requests=140+2,3+3,{_SIZES},storage=ring,count=3)"
DRAFT = "draft_attention(anchors=130,9,block=3,heads=2,D=64,dtype=f32,format=f32,storage=ring)"
CHUNKED = "compress_kv(requests=7+5,12+4,ratio=4,L=9,D=64,dtype=f32)"

by_rows = right.sparse_attention


def sink_in_the_numerator(*values) -> None:
    """The sink's share of the weight is added to every value."""
    card = get_card("sparse_attention")
    args = dict(zip(card.arg_names, values, strict=True))
    without = args["out"].clone()
    by_rows(*values)
    by_rows(*{**args, "sink": torch.full_like(args["sink"], -1e30), "out": without}.values())
    kept = (args["out"] * without).sum(-1, keepdim=True) / (without * without).sum(-1, keepdim=True)
    args["out"] += 1 - kept


def evicted_row_that_looks_alive(*values) -> None:
    """One key more than the window has, unless it is NaN."""
    card = get_card("sparse_attention")
    args = dict(zip(card.arg_names, values, strict=True))
    longer = args["out"].clone()
    by_rows(*values)
    by_rows(*{**args, "window_tokens": args["window_tokens"] + 1, "out": longer}.values())
    args["out"].copy_(torch.where(longer.isfinite().all(-1, keepdim=True), longer, args["out"]))


def in_order_of_pages(args: Args) -> Args:
    """Selected rows in the order in which they lie in memory."""
    rows = args["rows"].clone()
    for t, owner in enumerate(args["row_to_req"].tolist()):
        chosen = rows[t][rows[t] >= 0].long()
        block = args["block_table"][owner].long()[chosen // args["block_rows"]]
        order = torch.argsort(block * args["block_rows"] + chosen % args["block_rows"])
        rows[t, : chosen.numel()] = chosen[order].to(torch.int32)
    return {"rows": rows}


def next_page_at_the_end(args: Args) -> Args:
    rows, size = args["rows"], args["block_rows"]
    last = rows[rows >= 0].max() if rows.numel() else 0
    return {"rows": torch.where((rows >= 0) & (rows % size == size - 1) & (rows < last), rows + 1, rows)}


def split_by_row_count(*values) -> None:
    """Longer pieces of the key list when there are many query rows."""
    pieces = 32 if values[0].shape[0] > 2 else 64
    patched("sparse_attention", "deepinfer_hal.ops._attention.SPLIT", pieces, by_rows)(*values)


def last_draft_key_dropped(q, keys, lengths, sink, scale) -> torch.Tensor:
    return _attention.attend(q, keys, lengths - 1, sink, scale)


def without_update(*values) -> None:
    """The carry ring stays what it was."""
    args = dict(zip(get_card("compress_kv").arg_names, values, strict=True))
    compress_kv.compress_kv(*{**args, "carry": args["carry"].clone()}.values())


def one_position_late(*values) -> None:
    args = dict(zip(get_card("compress_kv").arg_names, values, strict=True))
    before = args["carry"].clone()
    compress_kv.compress_kv(*values)
    written = (args["carry"] != before).flatten(2).any(-1)
    after = args["carry"].clone()
    args["carry"].copy_(before)
    slot, place = written.nonzero(as_tuple=True)
    args["carry"][slot, (place + 1) % before.shape[1]] = after[slot, place]


def carried_tokens_last(value, gate, positions, row_to_req, cu_q, state_slots, last, ratio, carry, made=compress_kv._members):
    """Groups that began in an earlier call are added up from their newest token."""
    members = made(value, gate, positions, row_to_req, cu_q, state_slots, last, ratio, carry)
    first = positions[cu_q[:-1].long()[row_to_req[last].long()]]
    begun = positions[last] - ratio + 1 < first
    return torch.where(begun[:, None, None, None], members.flip(1), members)


def attention(name, case, fn, killed_by, why) -> Mutant:
    return Mutant(name, "sparse_attention", case, lambda: kernel("sparse_attention", name, fn, "yes"), killed_by, why,
                  right=right.attention_kernel)  # fmt: skip


def altered(change):
    return changed("sparse_attention", change, by_rows)


def compress(name, fn, killed_by, why) -> Mutant:
    return Mutant(name, "compress_kv", CHUNKED, lambda: kernel("compress_kv", name, fn, "yes"), killed_by, why,
                  right=right.compress_kernel)  # fmt: skip


MUTANTS = [
    attention("sink_in_the_numerator", RING, sink_in_the_numerator, ("values",),
              "The sink joins the weighted sum and not the denominator alone."),
    attention("sink_left_out", RING, altered(lambda args: {"sink": torch.full_like(args["sink"], -1e30)}), ("values",),
              "The sink is missing from the denominator."),
    attention("window_plus_one", ALONE, altered(lambda args: {"window_tokens": args["window_tokens"] + 1}),
              ("values", "poison", "paging"), "A query sees one position more than the window has."),
    attention("stale_row_that_looks_alive", ALONE, evicted_row_that_looks_alive, ("poison",),
              "A row that has left the window is used unless it happens to hold NaN."),
    attention("ring_modulo_off_by_one", RING, altered(lambda args: {"window_modulo": args["window_modulo"] + 1}),
              ("values", "paging"), "The ring is taken to be one row longer."),
    attention("window_origin_ignored", RING, altered(lambda args: {"window_origin": torch.zeros_like(args["window_origin"])}),
              ("paging",), "A flat window store that does not begin at position 0 is read at the wrong rows."),
    attention("ring_base_ignored", RING, altered(lambda args: {"window_base": torch.zeros_like(args["window_base"])}),
              ("values", "paging"), "Every request reads the first ring."),
    attention("pages_of_another_request", RING, altered(lambda args: {"block_table": args["block_table"].roll(1, 0)}),
              ("values", "poison"), "Selected rows are looked up in the neighbour's block table."),
    attention("last_page_row_off_by_one", RING, altered(next_page_at_the_end), ("values", "poison"),
              "Where a selected row is the last of its page, the first one of the next is read."),
    attention("keys_in_order_of_pages", RING, altered(in_order_of_pages), ("paging",),
              "Selected keys are added in the order of their addresses, which other requests decide."),
    attention("split_follows_row_count", RING, split_by_row_count, ("batch",),
              "The key list is cut into other pieces when there are more query rows."),
    attention("count_ignored", COUNTED, altered(lambda args: {"count": None}), ("empty", "untouched", "poison"),
              "Rows past the device's count are computed and written."),
    Mutant("last_draft_key_dropped", "draft_attention", DRAFT,
           lambda: kernel("draft_attention", "last_draft_key_dropped", patched(
               "draft_attention", "deepinfer_hal.ops.draft_attention.attend", last_draft_key_dropped)),
           ("values",), "The last row of a draft block is no key for the others."),
    Mutant("draft_window_without_anchor", "draft_attention", DRAFT,
           lambda: kernel("draft_attention", "draft_window_without_anchor", changed(
               "draft_attention", lambda args: {"anchor": args["anchor"] - 1})),
           ("values", "poison"), "The draft block does not see the token it follows."),
    compress("carry_not_updated", without_update, ("values", "chunks"),
             "The tokens of an unfinished group are not kept for the next call."),
    compress("carry_off_by_one_position", one_position_late, ("values", "chunks"),
             "Kept tokens lie one place too far in the ring."),
    compress("carried_group_in_another_order", patched(
        "compress_kv", "deepinfer_hal.ops.compress_kv._members", carried_tokens_last), ("chunks",),
        "A group that spans two calls is added up in another order than one that does not."),
    compress("state_of_another_request", changed("compress_kv", lambda args: {"state_slots": args["state_slots"].roll(1)}),
             ("values",), "Carried tokens are taken from the neighbour's ring."),
]  # fmt: skip

