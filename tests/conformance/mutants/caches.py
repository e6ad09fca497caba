"""Stores of KV rows: pages, slots, sections, copies."""

from __future__ import annotations

import torch
from deepinfer_hal import row_layout

from tests.conformance.mutants._base import Mutant, changed, kernel, patched, spoiled

LOAD = "load_kv(rows=20,D=64,format=fp8_32,block_rows=4,dtype=bf16)"
LOAD_SKIPPING = "load_kv(rows=20,D=64,format=fp8_32,block_rows=4,dtype=bf16,skip=3)"
WINDOW = "store_window_kv(rows=9,D=64,dtype=f32,format=fp8_32,skip=3)"
PAGED = "store_compressed_kv(rows=9,D=64,dtype=f32,format=fp4_16,block_rows=4)"
INDEX = "store_index_k(rows=9,D=128,dtype=f32,format=mxfp4_32,block_rows=4)"
COPY = "copy_rows(rows=9,bytes=288,skip=0)"
BLOCKS = "copy_blocks(rows=6,bytes=1152,skip=3)"
WRITE = "write_kv(rows=40,dtype=bf16,D=128,rope=64,format=fp8_32,block_rows=0,latent=False)"
WRITE_LATENT = "write_kv(rows=9,dtype=f32,D=64,rope=32,format=fp4_16,block_rows=64,latent=True,skip=2)"


def next_page_at_the_end(args):
    """The last row of a page is looked for as the first of the page after it."""
    slots, rows = args["slots"], args["block_rows"]
    past = (slots >= 0) & (slots % rows == rows - 1)
    return {"slots": torch.where(past, (slots + 1) % (args["cache"].shape[0] * rows), slots)}


def zero_skipped(args) -> None:
    args["out"][args["slots"] < 0] = 0


def negative_slots_wrap(args):
    last = args["cache"].shape[0] * max(args.get("block_rows", 0), 1) - 1
    return {"slots": torch.where(args["slots"] < 0, last, args["slots"])}


def dense_blocks(args):
    cache = args["cache"]
    return {"cache": cache.as_strided(cache.shape, (cache.shape[1], 1), cache.storage_offset())}


def interleaved(cache, format, width, block_rows):
    """Every row followed by its scales, as in a window store."""
    codes, scales = row_layout.code_bytes(format, width), row_layout.scale_bytes(format, width)
    rows = cache.unflatten(1, (block_rows, codes + scales))
    return rows[..., :codes], rows[..., codes:]


def tail_lost(args) -> None:
    """The last 32 bytes of a row, which are no whole vector, keep what they were."""
    args["dst"][args["dst_rows"].long(), -32:] = 0


def wrapping_copy(src, dst, cache) -> None:
    cache[dst.long()] = cache[src.long()]


def late_rounding(args):
    """The normed row stays in FP32 until it is stored."""
    return {"x": args["x"].float(), "norm_weight": args["norm_weight"].float()}


def latent_of_skipped(args) -> None:
    if args["format"] in row_layout.ROW_FORMATS:
        args["latent"][args["slots"] < 0] = 0


def mutant(name, op, case, fn, killed_by, why) -> Mutant:
    return Mutant(name, op, case, lambda: kernel(op, name, fn), killed_by, why)


MUTANTS = [
    mutant("page_off_by_one", "load_kv", LOAD, changed("load_kv", next_page_at_the_end), ("values",),
           "The last row of a page is read from the next page."),
    mutant("skipped_row_zeroed", "load_kv", LOAD_SKIPPING, spoiled("load_kv", zero_skipped), ("untouched",),
           "Output rows of slot -1 are cleared instead of left alone."),
    mutant("slot_minus_one_written", "store_window_kv", WINDOW, changed("store_window_kv", negative_slots_wrap),
           ("untouched", "batch"),
           "Slot -1 counts from the end and overwrites the last row of the store."),
    mutant("page_off_by_one_in_store", "store_compressed_kv", PAGED, changed("store_compressed_kv", next_page_at_the_end),
           ("discrete", "overwrite", "nan", "extremes", "batch"), "The last row of a page is stored in the next page."),
    mutant("gap_between_blocks_ignored", "store_compressed_kv", PAGED, changed("store_compressed_kv", dense_blocks),
           ("views", "sentinels"), "Blocks are taken to follow each other without a gap."),
    mutant("scales_interleaved", "store_index_k", INDEX, patched(
        "store_index_k", "deepinfer_hal.row_layout.sections", interleaved),
        ("discrete", "untouched", "overwrite", "nan", "extremes"),
        "Scales lie behind each row instead of behind all rows of the block."),
    mutant("copy_drops_the_tail", "copy_rows", COPY, spoiled("copy_rows", tail_lost), ("discrete",),
           "The bytes after the last whole vector are not copied."),
    mutant("copy_of_block_minus_one", "copy_blocks", BLOCKS, wrapping_copy, ("untouched",),
           "A pair with -1 copies the last block, or overwrites it."),
    mutant("composite_rounds_late", "write_kv", WRITE, changed("write_kv", late_rounding),
           ("values", "nan", "extremes", "composites"),
           "The fused kernel drops the rounding between norm and rope, so codes differ from those of its parts."),
    mutant("latent_of_skipped_row", "write_kv", WRITE_LATENT, spoiled("write_kv", latent_of_skipped), ("untouched",),
           "The latent of a row that is not stored is written all the same."),
    mutant("rope_by_slot", "write_kv", WRITE, changed("write_kv", lambda args: {"positions": args["slots"]}),
           ("values", "nan", "extremes", "composites"), "Rows are rotated by where they are stored, not by their position."),
]  # fmt: skip

