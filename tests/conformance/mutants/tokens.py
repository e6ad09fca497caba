"""Token ids in and out: embeddings, n-gram memory, logits, sampling, verification, the step's history."""

from __future__ import annotations

import torch

from tests.conformance.mutants._base import Args, Mutant, changed, kernel, spoiled

EMBED = "embedding_gather(T=5,V=40,H=32,m=2,w=bf16,out=bf16)"
HASH = "engram_hash(T=8,N=3,Q=2,V=259)"
LOOKUP = "engram_lookup(T=4,C=3,rows=50,d=32,out=u8)"
GREEDY = "sample(S=33,V=2048,mode=greedy,purpose=0)"
PLAIN = "sample(S=33,V=64,mode=plain,purpose=2)"
FILTERED = "sample(S=33,V=64,mode=filtered,purpose=0)"
MASK = "mask_logits(S=5,V=70,L=20,mode=all)"
FLAGS = "nan_row_flags(S=6,V=33)"
TOP = "top_logprobs(S=3,V=33,k=4)"
ADVANCE = "advance_step(rows=9,slots=40,length=16,skip=3)"
VERIFY = "verify_drafts(R=9,B=4,V=32,rule=coupled)"


def bad_ids_read_row_zero(args: Args) -> Args:
    size = args["table"].shape[0]
    return {"ids": torch.where((args["ids"] < 0) | (args["ids"] >= size), 0, args["ids"])}


def pad_is_mapped(args: Args) -> Args:
    """The pad, a compressed id already, goes through the map of ids."""
    return {"pad": int(args["token_map"][args["pad"]])}


def looks_past_the_start(args: Args) -> Args:
    """Ids before a -1 count again: the window does not stop there."""
    ngrams = args["ngrams"].clone()
    ngrams[(ngrams < 0) & (ngrams.roll(-1, 1) >= 0)] = 0
    return {"ngrams": ngrams}


def last_table_row_for_bad_ones(args: Args) -> Args:
    size = args["table"].shape[0]
    inside = (args["rows"] >= 0) & (args["rows"] < size)
    return {"rows": torch.where(inside, args["rows"], size - 1)}


def last_of_equals(args: Args) -> None:
    greedy = (args["temperature"] == 0) & (args["tokens"] >= 0)
    last = args["logits"].shape[1] - 1 - args["logits"].flip(1).argmax(1)
    args["tokens"].copy_(torch.where(greedy, last.to(torch.int32), args["tokens"]))


def crossing_token_dropped(args: Args) -> Args:
    """A token counts towards the mass before itself."""
    return {"top_p": torch.where(args["top_p"] < 1, args["top_p"] * 0.5, args["top_p"])}


def low_half_of_the_seed(args: Args) -> Args:
    return {"seeds": args["seeds"] & 0xFFFFFFFF}


def bits_from_the_top(args: Args) -> Args:
    words = args["allowed"].long()
    flipped = sum(((words >> bit) & 1) << (31 - bit) for bit in range(32))
    return {"allowed": torch.where(flipped >= 2**31, flipped - 2**32, flipped).to(torch.int32)}


def infinity_is_fine(args: Args) -> None:
    args["flags"][args["logits"].amax(1) == float("inf")] = 0


def wrapping_history(tokens, slots, positions, history) -> None:
    history[slots.long(), positions.long()] = tokens


def later_drafts_stand(args: Args) -> None:
    """All drafts that equal their target are counted, also those after a refusal."""
    width = args["drafts"].shape[1]
    offered = torch.arange(width) < args["draft_counts"][:, None]
    args["accepted"].copy_(((args["drafts"] == args["target"][:, :width]) & offered & (args["drafts"] >= 0)).sum(1))


def mutant(name, op, case, fn, killed_by, why) -> Mutant:
    return Mutant(name, op, case, lambda: kernel(op, name, fn), killed_by, why)


MUTANTS = [
    mutant("bad_id_reads_row_zero", "embedding_gather", EMBED, changed("embedding_gather", bad_ids_read_row_zero),
           ("values",), "An id outside the vocabulary gives a token's row instead of zeros."),
    mutant("engram_pad_mapped", "engram_hash", HASH, changed("engram_hash", pad_is_mapped), ("discrete",),
           "The pad is looked up in the map of ids, though it is a compressed id already."),
    mutant("engram_window_goes_on", "engram_hash", HASH, changed("engram_hash", looks_past_the_start), ("discrete",),
           "Ids beyond the place where the window stops take part in the hash."),
    mutant("engram_bad_row_reads_the_last", "engram_lookup", LOOKUP, changed("engram_lookup", last_table_row_for_bad_ones),
           ("values",), "A row outside the table gives the last one instead of zeros."),
    mutant("greedy_tie_upward", "sample", GREEDY, spoiled("sample", last_of_equals), ("discrete",),
           "Of equal logits the higher id is taken."),
    mutant("noise_of_another_purpose", "sample", PLAIN, changed("sample", lambda args: {"purpose": 0}), ("discrete",),
           "Draft and target tokens are drawn with the same noise."),
    mutant("noise_of_the_previous_position", "sample", PLAIN, changed(
        "sample", lambda args: {"positions": args["positions"] - 1}), ("discrete",),
        "The noise belongs to the last token, not to the one that is made."),
    mutant("half_of_the_seed", "sample", PLAIN, changed("sample", low_half_of_the_seed), ("discrete",),
           "Only 32 bits of the seed count."),
    mutant("top_p_too_strict", "sample", FILTERED, changed("sample", crossing_token_dropped), ("discrete",),
           "Tokens are dropped though the mass before them is below top_p."),
    mutant("mask_bits_from_the_top", "mask_logits", MASK, changed("mask_logits", bits_from_the_top), ("values",),
           "Bit 31 of a word stands for its first token."),
    mutant("penalty_counts_the_prompt", "mask_logits", MASK, changed(
        "mask_logits", lambda args: {"prompt_len": torch.zeros_like(args["prompt_len"])}), ("values",),
        "Tokens of the prompt count as output."),
    mutant("infinite_logit_not_flagged", "nan_row_flags", FLAGS, spoiled("nan_row_flags", infinity_is_fine),
           ("discrete", "nan"), "A row with an infinite logit passes as healthy."),
    mutant("rank_from_zero", "top_logprobs", TOP, spoiled(
        "top_logprobs", lambda args: args["chosen_rank"].sub_((args["chosen"] >= 0).int())), ("discrete",),
        "The most probable token has rank 0."),
    mutant("history_of_slot_minus_one", "advance_step", ADVANCE, wrapping_history, ("untouched",),
           "A finished request's token is appended to the last slot."),
    mutant("drafts_after_a_refusal_count", "verify_drafts", VERIFY, spoiled("verify_drafts", later_drafts_stand),
           ("discrete",), "A draft that stands after one that fell is accepted."),
]  # fmt: skip

