"""Cards of the caches, the indexer and attention: their references against loops in numpy, and their edges."""

import numpy as np
import pytest
import torch
from cache_cards import assert_within, count_rows, is_poison, make, run
from deepinfer_hal import formats, row_layout
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops.draft_attention import draft_attention
from deepinfer_hal.ops.score_index import score_index
from deepinfer_hal.ops.select_candidate_blocks import select_candidate_blocks
from deepinfer_hal.ops.select_topk import select_topk
from deepinfer_hal.ops.sparse_attention import sparse_attention
from harness import assert_row_independent, case_id, cases_of, run_case
from numpy_rows import attend, decode_row, row_section

STORES = ("store_window_kv", "store_compressed_kv", "store_index_k")
ALL = (
    *STORES, "write_kv", "load_kv", "compress_kv", "score_index", "select_topk", "select_candidate_blocks",
    "sparse_attention", "draft_attention", "draft_features", "store_draft_kv",
)  # fmt: skip
WRITERS = (*STORES, "write_kv", "store_draft_kv")


def rows_are_independent(card) -> bool:
    return card.reference_invariant == "yes" and "count" in card.arg_names and card.name not in WRITERS


@pytest.mark.parametrize("card, case", cases_of(*ALL), ids=case_id)
def test_float32_agrees_with_float64_and_writes_nothing_else(card, case):
    run_case(card, case)


@pytest.mark.parametrize("card, case", [c for c in cases_of(*ALL) if rows_are_independent(c[0])], ids=case_id)
def test_rows_do_not_depend_on_the_rows_after_them(card, case):
    assert_row_independent(card, case)


# ------------------------------------------------------------------------------------------------------ stores


@pytest.mark.parametrize("card, case", cases_of(*STORES), ids=case_id)
def test_a_store_puts_codes_and_scales_where_the_layout_says_and_nothing_else(card, case):
    args = run(case)
    width, format, block_rows = args["x"].shape[1], args["format"], args.get("block_rows", 0)
    n, untouched = count_rows(args, args["x"].shape[0]), make(case)["cache"]
    for t in range(n):
        slot = int(args["slots"][t])
        if slot < 0:
            continue
        codes, scales = row_section(args["cache"], slot, format, width, block_rows)
        if format == "f32":
            assert np.array_equal(codes.view("<f4"), args["x"][t].float().numpy())
        else:
            expected = formats.quantise(args["x"][t : t + 1], format)
            assert np.array_equal(codes, expected[0][0].numpy()) and np.array_equal(scales, expected[1][0].numpy())
    written = set(args["slots"][:n].tolist()) - {-1}
    rows = max(block_rows, 1)
    for slot in set(range(args["cache"].shape[0] * rows)) - written:
        for after, before in zip(
            row_section(args["cache"], slot, format, width, block_rows),
            row_section(untouched, slot, format, width, block_rows),
            strict=True,
        ):
            assert np.array_equal(after, before)


def test_a_store_leaves_the_gap_between_blocks_alone():
    args = make(Case("store_compressed_kv", dict(rows=33, D=512, dtype="bf16", format="fp4_16", block_rows=64)))
    whole = torch.full((6, args["cache"].shape[1] + 32), 0x11, dtype=torch.uint8)
    args["cache"] = whole[:, :-32]
    get_card("store_compressed_kv").reference(*args.values())
    assert bool((whole[:, -32:] == 0x11).all())


FLOAT_ROWS = [
    (get_card("write_kv"), Case("write_kv", dict(rows=33, dtype="f32", D=512, rope=64, format="f32", block_rows=rows,
                                                 latent=True, padding=64, count=20, skip=3)))
    for rows in (0, 64)
]  # fmt: skip


@pytest.mark.parametrize("card, case", cases_of("write_kv", "store_draft_kv") + FLOAT_ROWS, ids=case_id)
def test_write_kv_is_norm_rope_and_store(card, case):
    args = run(case)
    width, half = args["x"].shape[1], args["table"].shape[1] // 2
    for t in range(args["x"].shape[0]):
        skipped = t >= count_rows(args, args["x"].shape[0]) or int(args["slots"][t]) < 0
        if args.get("latent") is not None and skipped:
            assert is_poison(args["latent"][t])
        if skipped:
            continue
        x = args["x"][t].double().numpy()
        z = args["norm_weight"].double().numpy() * x / np.sqrt((x * x).mean() + args["eps"])
        if args.get("latent") is not None:
            np.testing.assert_allclose(args["latent"][t].double().numpy(), z, rtol=2**-8, atol=1e-6)
        cos, sin = np.split(args["table"][int(args["positions"][t])].double().numpy(), 2)
        a, b = z[width - 2 * half :: 2].copy(), z[width - 2 * half + 1 :: 2].copy()
        z[width - 2 * half :: 2], z[width - 2 * half + 1 :: 2] = a * cos - b * sin, a * sin + b * cos
        stored = decode_row(args["cache"], int(args["slots"][t]), args["format"], width, args.get("block_rows", 0))
        step = {"f32": 1e-6, "fp8_32": 0.05}.get(args["format"], 0.2)
        assert np.abs(stored - z).max() <= step * max(1.0, np.abs(z).max())


@pytest.mark.parametrize("card, case", cases_of("load_kv"), ids=case_id)
def test_load_kv_reads_every_format(card, case):
    args = run(case)
    for n, slot in enumerate(args["slots"].tolist()):
        if slot < 0:
            assert is_poison(args["out"][n])
            continue
        width = args["out"].shape[1]
        expected = decode_row(args["cache"], slot, args["format"], width, args["block_rows"])
        rounded = torch.from_numpy(expected).to(args["out"].dtype)
        assert torch.equal(args["out"][n], rounded)


def test_a_cache_that_is_too_small_is_refused_with_the_size_it_needs():
    args = make(Case("store_window_kv", dict(rows=3, D=512, dtype="bf16", format="fp8_32")))
    args["cache"] = args["cache"][:, :512]
    with pytest.raises(BadCall, match=r"store_window_kv: cache must be uint8 \[blocks, >= 528\]"):
        check_call(get_card("store_window_kv"), args)


def test_an_unknown_row_format_and_a_width_it_cannot_hold_are_refused():
    args = make(Case("store_window_kv", dict(rows=3, D=512, dtype="bf16", format="fp8_32")))
    with pytest.raises(BadCall, match="unknown row format 'fp9'"):
        check_call(get_card("store_window_kv"), {**args, "format": "fp9"})
    with pytest.raises(BadCall, match="positive multiple of 32, got 500"):
        check_call(get_card("store_window_kv"), {**args, "x": args["x"][:, :500]})


# ------------------------------------------------------------------------------------------------- compressor


@pytest.mark.parametrize("card, case", cases_of("compress_kv"), ids=case_id)
def test_compress_kv_pools_each_group_over_this_step_and_the_carry(card, case):
    args = run(case)
    before = make(case)["carry"]
    ratio, length = args["ratio"], before.shape[1]
    expected_carry = before.clone()
    tokens = [{} for _ in args["state_slots"]]
    for r, slot in enumerate(args["state_slots"].tolist()):
        start, end = int(args["cu_q"][r]), int(args["cu_q"][r + 1])
        first = int(args["positions"][start])
        for p in range(max(0, first - length), first):
            tokens[r][p] = before[slot, p % length]
        for t in range(start, end):
            tokens[r][first + t - start] = torch.stack((args["value"][t], args["gate"][t]))
        for p in range(max(first, first + end - start - length), first + end - start):
            expected_carry[slot, p % length] = tokens[r][p]
    assert torch.equal(args["carry"].nan_to_num(7), expected_carry.nan_to_num(7))
    expected = np.full(args["out"].shape, np.nan)
    for group, row in enumerate(args["complete"].tolist()):
        if row >= 0:
            own, p = tokens[int(args["row_to_req"][row])], int(args["positions"][row])
            members = torch.stack([own[i] for i in range(p - ratio + 1, p + 1)]).double().numpy()
            weight = np.exp(members[:, 1])
            expected[group] = (members[:, 0] * weight).sum(0) / weight.sum(0)
    assert_within(card, args, "out", expected)


def compress_chunks(value, gate, chunks, ratio, ring):
    """Rows by group id when one request's tokens are fed as (first position, length) chunks, in order."""
    carry, rows = torch.full((1, ring, 2, value.shape[1]), float("nan")), {}
    i32 = {"dtype": torch.int32}
    for first, n in chunks:
        positions = torch.arange(first, first + n, **i32)
        complete = torch.tensor([t for t in range(n) if (first + t + 1) % ratio == 0] + [-1], **i32)
        out = torch.full((complete.shape[0], value.shape[1]), float("nan"))
        slot, cu_q = torch.zeros(1, **i32), torch.tensor([0, n], **i32)
        args = (value[first : first + n], gate[first : first + n], positions, torch.zeros(n, **i32), cu_q, slot)
        get_card("compress_kv").reference(*args, complete, ratio, carry, out)
        for row, t in zip(out, complete.tolist(), strict=True):
            if t >= 0:
                rows[(first + t + 1) // ratio - 1] = row
    return rows, carry


@pytest.mark.parametrize("ratio", [2, 4])
def test_compress_kv_does_not_depend_on_chunk_boundaries(ratio):
    g = torch.Generator().manual_seed(1)
    value, gate = torch.randn(40, 32, generator=g), torch.randn(40, 32, generator=g)
    whole, carry = compress_chunks(value, gate, [(0, 40)], ratio, ratio + 5)
    assert sorted(whole) == list(range(40 // ratio))
    for size in (1, 3, 7, 13):
        chunks = [(first, min(size, 40 - first)) for first in range(0, 40, size)]
        split, carry_split = compress_chunks(value, gate, chunks, ratio, ratio + 5)
        assert all(torch.equal(whole[j], split[j]) for j in whole)
        assert torch.equal(carry, carry_split)


@pytest.mark.parametrize("back", range(7))
@pytest.mark.parametrize("end", [20, 21])
def test_compress_kv_after_a_rollback_is_as_if_it_had_never_gone_forward(back, end):
    """Six rejected tokens at most: the ring holds ratio + 6 - 1 tokens."""
    g = torch.Generator().manual_seed(2)
    value, gate = torch.randn(40, 32, generator=g), torch.randn(40, 32, generator=g)
    other = torch.randn(40, 32, generator=g)
    wrong = torch.cat((value[: end - back], other[end - back : end], value[end:]))
    kept = [(first, 1) for first in range(end - back)]
    straight, _ = compress_chunks(value, gate, [*kept, (end - back, 9)], 2, 7)
    ran = compress_chunks_with_rollback(wrong, value, gate, kept, (end - back, back), (end - back, 9))
    assert all(torch.equal(straight[j], ran[j]) for j in straight)


def compress_chunks_with_rollback(wrong, value, gate, kept, rejected, resumed):
    """Rows after the kept tokens, a rejected chunk of other values, and the resumed chunk that overwrites it."""
    spliced = {}
    carry = torch.full((1, 7, 2, value.shape[1]), float("nan"))
    i32 = {"dtype": torch.int32}
    for source, (first, n) in [*((value, c) for c in kept), (wrong, rejected), (value, resumed)]:
        complete = torch.tensor([t for t in range(n) if (first + t + 1) % 2 == 0] + [-1], **i32)
        out = torch.full((complete.shape[0], value.shape[1]), float("nan"))
        get_card("compress_kv").reference(
            source[first : first + n], gate[first : first + n], torch.arange(first, first + n, **i32),
            torch.zeros(n, **i32), torch.tensor([0, n], **i32), torch.zeros(1, **i32), complete, 2, carry, out,
        )  # fmt: skip
        for row, t in zip(out, complete.tolist(), strict=True):
            if t >= 0:
                spliced[(first + t + 1) // 2 - 1] = row
    return spliced


# ---------------------------------------------------------------------------------------------------- indexer


@pytest.mark.parametrize("card, case", cases_of("score_index"), ids=case_id)
def test_score_index_is_the_weighted_sum_of_positive_products(card, case):
    args = run(case)
    q = args["q"] if args["q_scale"] is None else formats.dequantise(args["q"], args["q_scale"], "mxfp4_32")
    q, w, width, rows = q.double().numpy(), args["weights"].double().numpy(), q.shape[-1], args["block_rows"]
    expected = np.full(args["scores"].shape, np.nan)
    for t in range(count_rows(args, q.shape[0])):
        r = int(args["row_to_req"][t])
        if r < 0:
            continue
        expected[t] = -np.inf
        for column in range(expected.shape[1]):
            j = column
            if args["candidates"] is not None:
                block = int(args["candidates"][t, column // 8])
                j = block * 8 + column % 8 if block >= 0 else -1
            if 0 <= j < int(args["visible"][t]):
                slot = int(args["block_table"][r, j // rows]) * rows + j % rows
                key = decode_row(args["cache"], slot, args["format"], width, rows)
                expected[t, column] = w[t] @ np.maximum(q[t] @ key, 0)
    assert_within(card, args, "scores", expected)


def test_score_index_scores_a_candidate_row_with_the_bits_of_the_full_score():
    case = Case("score_index", dict(requests="300+3", heads=4, d=128, q="mxfp4_32", format="mxfp4_32", block_rows=64,
                                    dtype="bf16", ratio=1, candidates=16))  # fmt: skip
    pooled = run(case)
    full = torch.full((3, 310), float("nan"))
    score_index(**{**pooled, "candidates": None, "scores": full})
    for t in range(3):
        for c, block in enumerate(pooled["candidates"][t].tolist()):
            if block >= 0:
                own = full[t, 8 * block : 8 * block + 8]
                assert torch.equal(pooled["scores"][t, 8 * c : 8 * c + 8], own)


@pytest.mark.parametrize("card, case", cases_of("select_topk"), ids=case_id)
def test_select_topk_takes_the_highest_with_ties_to_the_lower_row(card, case):
    args = run(case)
    k = args["rows"].shape[1]
    for t in range(args["rows"].shape[0]):
        if t >= count_rows(args, args["rows"].shape[0]):
            assert is_poison(args["rows"][t])
            continue
        ranked = []
        for column, score in enumerate(args["scores"][t].tolist()):
            row = column
            if args["candidates"] is not None:
                block = int(args["candidates"][t, column // 8])
                row = block * 8 + column % 8 if block >= 0 else -1
            if row >= 0 and score > float("-inf"):
                ranked.append((-score, row))
        chosen = sorted(row for _, row in sorted(ranked)[:k])
        assert args["rows"][t].tolist() == chosen + [-1] * (k - len(chosen))


@pytest.mark.parametrize("card, case", cases_of("select_candidate_blocks"), ids=case_id)
def test_select_candidate_blocks_ranks_by_block_maximum_and_keeps_the_last(card, case):
    args = run(case)
    size, many = args["block"], args["out"].shape[1]
    for t in range(args["out"].shape[0]):
        if t >= count_rows(args, args["out"].shape[0]):
            assert is_poison(args["out"][t])
            continue
        seen = int(args["visible"][t])
        ranked = []
        for block in range(-(-seen // size)):
            best = max(args["scores"][t, block * size : min(seen, (block + 1) * size)].tolist())
            ranked.append((-(float("inf") if block == (seen - 1) // size else best), block))
        chosen = sorted(block for _, block in sorted(ranked)[:many])
        assert args["out"][t].tolist() == chosen + [-1] * (many - len(chosen))


def test_selection_never_takes_minus_infinity_or_nan():
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([[nan, -inf, 1.0, -inf, 2.0], [-inf] * 5])
    rows = torch.zeros(2, 4, dtype=torch.int32)
    select_topk(scores, None, 1, None, rows)
    assert rows.tolist() == [[2, 4, -1, -1], [-1] * 4]
    few = torch.zeros(2, 2, dtype=torch.int32)
    select_topk(scores, None, 1, None, few)
    assert few.tolist() == [[2, 4], [-1] * 2], "NaN takes no place of a finite score"
    blocks = torch.zeros(2, 4, dtype=torch.int32)
    select_candidate_blocks(scores, torch.tensor([5, 0], dtype=torch.int32), 2, None, blocks)
    assert blocks.tolist() == [[1, 2, -1, -1], [-1] * 4]


# -------------------------------------------------------------------------------------------------- attention


def expected_attention(args) -> np.ndarray:
    """float64 [T, h, D]; NaN where a row must stay untouched."""
    q, width = args["q"].double().numpy(), args["q"].shape[2]
    expected, rows = np.full(q.shape, np.nan), args["block_rows"]
    for t in range(count_rows(args, q.shape[0])):
        r, p = int(args["row_to_req"][t]), int(args["positions"][t])
        if r < 0 or p < 0:
            continue
        base, origin, modulo = (int(args[f"window_{n}"][r]) for n in ("base", "origin", "modulo"))
        keys = [
            decode_row(args["window"], base + (s - origin) % modulo, args["window_format"], width, 0)
            for s in range(max(0, origin, p - args["window_tokens"] + 1), p + 1)
        ]
        for j in [] if args["rows"] is None else args["rows"][t].tolist():
            if j < 0:
                break
            slot = int(args["block_table"][r, j // rows]) * rows + j % rows
            keys.append(decode_row(args["compressed"], slot, args["compressed_format"], width, rows))
        expected[t] = attend(q[t], keys, args["sink"].double().numpy(), args["scale"])
    return expected


@pytest.mark.parametrize("card, case", cases_of("sparse_attention"), ids=case_id)
def test_sparse_attention_is_softmax_with_a_sink_over_the_listed_keys(card, case):
    """Every row that no query may see is 0xFF bytes, which decode to NaN: none of it reaches an output."""
    args = run(case)
    assert_within(card, args, "out", expected_attention(args))


NANO = dict(heads=4, D=512, k=64, block_rows=64, dtype="f32", window="fp8_32", compressed="fp4_16", storage="ring")


@pytest.mark.parametrize("requests", ["127+1", "128+1", "134+3", "266+6", "0+1"])
def test_sparse_attention_gives_equal_bits_from_a_ring_and_from_flat_rows(requests):
    """One request, its ring wrapped at 134 rows, against the same rows laid flat from the first visible position."""
    args = run(Case("sparse_attention", dict(requests=requests, **NANO)))
    first = max(0, int(args["positions"][0]) - 127)
    positions = torch.arange(first, int(args["positions"][-1]) + 1)
    flat = {**args, "out": torch.full_like(args["out"], float("nan"))}
    flat["window"] = args["window"][int(args["window_base"][0]) + positions % int(args["window_modulo"][0])]
    flat["window_base"] = torch.zeros(1, dtype=torch.int32)
    flat["window_origin"] = torch.tensor([first], dtype=torch.int32)
    flat["window_modulo"] = torch.tensor([len(positions)], dtype=torch.int32)
    sparse_attention(**flat)
    assert torch.equal(flat["out"], args["out"])


def decoded(cache, format, width, block_rows):
    """A store of format bf16 with the rows of `cache`, by load_kv."""
    slots = torch.arange(cache.shape[0] * max(block_rows, 1), dtype=torch.int32)
    rows = torch.empty(len(slots), width, dtype=torch.bfloat16)
    get_card("load_kv").reference(cache, slots, format, block_rows, rows)
    return rows.view(torch.uint8).view(cache.shape[0], -1)


@pytest.mark.parametrize("storage", ["ring", "flat"])
def test_sparse_attention_gives_equal_bits_from_rows_that_load_kv_decoded(storage):
    args = run(Case("sparse_attention", dict(requests="140+3,5+2", **{**NANO, "storage": storage})))
    width, flat = args["q"].shape[2], {**args, "out": torch.full_like(args["out"], float("nan"))}
    flat["window"], flat["window_format"] = decoded(args["window"], args["window_format"], width, 0), "bf16"
    flat["compressed"] = decoded(args["compressed"], args["compressed_format"], width, args["block_rows"])
    flat["compressed_format"] = "bf16"
    check_call(get_card("sparse_attention"), flat)
    sparse_attention(**flat)
    assert torch.equal(flat["out"], args["out"])


def test_rows_of_bf16_are_rounded_once_to_nearest_even_and_have_no_scales():
    values = torch.tensor([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(2.0**-133)] * 8])
    cache = torch.full((2, 2 * 64 + 6), 0x11, dtype=torch.uint8)
    row_layout.write_rows(cache, torch.tensor([3]), values, "bf16", 2)
    assert torch.equal(row_layout.read_rows(cache, torch.tensor([3]), "bf16", 32, 2), values.bfloat16().float())
    assert row_layout.block_bytes("bf16", 32, 2) == 128 and row_layout.scale_bytes("bf16", 32) == 0
    assert bool((cache[0] == 0x11).all() and (cache[1, :64] == 0x11).all() and (cache[1, 128:] == 0x11).all())


def test_sparse_attention_sees_exactly_128_window_positions():
    args = run(Case("sparse_attention", dict(requests="200+1", **{**NANO, "k": 0})))
    before = args["out"].clone()
    for position, changes in ((72, False), (73, True), (200, True), (201, False)):
        window = args["window"].clone()
        window[int(args["window_base"][0]) + position % 134] = 0x40
        sparse_attention(**{**args, "window": window})
        assert torch.equal(args["out"], before) != changes


def test_sparse_attention_stops_at_the_first_minus_one():
    args = make(Case("sparse_attention", dict(requests="200+2", **NANO)))
    args["rows"][:, 10] = -1
    out = args["out"].clone()
    sparse_attention(**args)
    sparse_attention(**{**args, "rows": args["rows"][:, :10].contiguous(), "out": out})
    assert torch.equal(args["out"], out)


def test_sparse_attention_without_any_key_gives_zero():
    args = make(Case("sparse_attention", dict(requests="5+2", **{**NANO, "k": 0})))
    args["window_origin"][:] = 6
    args["window_modulo"][:] = 100
    sparse_attention(**args)
    assert bool((args["out"][0] == 0).all()) and not bool(args["out"].isnan().any())


def test_a_huge_sink_takes_all_weight_and_a_sink_of_minus_infinity_none():
    args = make(Case("sparse_attention", dict(requests="9+1", **{**NANO, "window": "f32", "k": 0})))
    args["sink"][:] = torch.tensor([1000.0, float("-inf"), -1000.0, 0.0])
    sparse_attention(**args)
    assert bool((args["out"][0, 0] == 0).all())
    assert torch.equal(args["out"].isfinite(), torch.ones_like(args["out"], dtype=torch.bool))
    args["q"][:] = 0
    sparse_attention(**args)
    keys = args["window"].view(torch.float32)[: 134][int(args["window_base"][0]) : int(args["window_base"][0]) + 10]
    torch.testing.assert_close(args["out"][0, 1], keys.mean(0))
    torch.testing.assert_close(args["out"][0, 3], keys.sum(0) / 11)


def test_sparse_attention_in_small_chunks_agrees_with_one_chunk(monkeypatch):
    case = Case("sparse_attention", dict(requests="120+20,3+4", **NANO))
    whole = run(case)
    monkeypatch.setattr("deepinfer_hal.ops._attention.GATHER_BYTES", 1 << 20)
    chunked = run(case)
    assert_within(get_card("sparse_attention"), chunked, "out", whole["out"].double())


def test_sparse_attention_without_a_block_table_for_its_rows_is_refused():
    args = make(Case("sparse_attention", dict(requests="5+2", **NANO)))
    with pytest.raises(BadCall, match="rows are given, so compressed, block_table"):
        check_call(get_card("sparse_attention"), {**args, "block_table": None})


@pytest.mark.parametrize("card, case", cases_of("draft_attention"), ids=case_id)
def test_draft_attention_sees_the_window_and_the_whole_block(card, case):
    args = run(case)
    q, block, width = args["q"].double().numpy(), args["draft_block"], args["q"].shape[2]
    expected = np.full(q.shape, np.nan)
    for r in range(count_rows(args, args["anchor"].shape[0])):
        anchor = int(args["anchor"][r])
        if anchor < 0:
            continue
        base, origin, modulo = (int(args[f"window_{n}"][r]) for n in ("base", "origin", "modulo"))
        keys = [
            decode_row(args["window"], base + (s - origin) % modulo, args["window_format"], width, 0)
            for s in range(max(0, anchor - args["window_tokens"] + 1), anchor + 1)
        ]
        keys += [decode_row(args["draft_kv"], r * block + b, args["window_format"], width, 0) for b in range(block)]
        for t in range(r * block, (r + 1) * block):
            expected[t] = attend(q[t], keys, args["sink"].double().numpy(), args["scale"])
    assert_within(card, args, "out", expected)


def test_draft_queries_see_later_draft_rows():
    plain = dict(heads=4, D=512, dtype="f32", format="f32", storage="ring")
    args = run(Case("draft_attention", dict(anchors="20", block=5, **plain)))
    before = args["out"].clone()
    args["draft_kv"].view(torch.float32)[4] += 1
    draft_attention(**args)
    assert bool((args["out"] != before).flatten(1).any(1).all())


@pytest.mark.parametrize("card, case", cases_of("draft_features"), ids=case_id)
def test_draft_features_are_stream_means_and_stay_in_their_slice(card, case):
    args = run(case)
    n = count_rows(args, args["out"].shape[0])
    expected = np.full(args["out"].shape, np.nan)
    expected[:n] = args["streams"][:n].double().numpy().mean(1)
    assert_within(card, args, "out", expected)
