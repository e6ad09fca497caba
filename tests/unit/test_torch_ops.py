"""What stands beside the kernels as torch's own computes the op, or the part of it that its words tell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from deepinfer_hal.card import all_cards, get_card
from deepinfer_hal.formats import dequantise, quantise
from deepinfer_hal.weights import CanonicalWeight, prepare_canonical

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("tools", "tools/cuda")]
import torch_ops  # noqa: E402

BF16, F32, I32, I64, U8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8
ROWS = 6


def normal(*shape, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=F32).to(dtype)


def zeros(*shape, dtype=I32):
    return torch.zeros(shape, dtype=dtype)


def both(op, args):
    """The reference's arguments after its call, by name, and what torch's operators give."""
    card = get_card(op)
    named = card.bind_args(args, {})
    theirs = torch_ops.torchs_own(op, {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in named.items()})
    card.reference(*args)
    return named, theirs.call()


def seeded(count):
    return torch.randperm(count, generator=torch.Generator().manual_seed(count)).int()


def test_only_cards_have_operators():
    assert set(torch_ops._MAKERS) <= set(all_cards()) and "draft_attention" in torch_ops._MAKERS


def test_a_row_tells_the_median_of_a_call_or_that_there_is_none(monkeypatch):
    monkeypatch.setattr(torch_ops, "microseconds", lambda run, samples: run() or 30.0)
    made = []
    call = torch_ops.TorchCall("words", lambda: made.append(1))
    row = torch_ops.torch_row([call, None, call], 3)
    assert row == {"torch": "words", "torch_us": 15.0} and len(made) == 2
    assert torch_ops.beside(row) == "  torch 15.00 us (words)"
    nothing = torch_ops.torch_row([None], 3)
    assert nothing == {"torch": None, "torch_us": None} and torch_ops.beside(nothing) == torch_ops.beside({}) == ""


def test_rms_norm_of_a_slice():
    args = (normal(ROWS, 96, dtype=BF16)[:, :64], normal(64, dtype=BF16), 0.5, None, zeros(ROWS, 64, dtype=BF16), None, None)
    named, got = both("rms_norm", args)
    torch.testing.assert_close(got, named["out"])


def test_permute_gathers_the_same_rows():
    ids = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(t))[:3] for t in range(ROWS)]).int()
    out = (zeros(ROWS * 3, 64, dtype=U8), zeros(ROWS * 3, 2, dtype=U8), zeros(9), zeros(ROWS * 3), zeros(ROWS, 3))
    x, scale = torch.arange(ROWS * 64).view(ROWS, 64).to(U8), zeros(ROWS, 2, dtype=U8)
    named, got = both("permute", (x, scale, ids, 8, None, *out))
    assert torch.equal(got, named["out"])


def test_swiglu_and_codes():
    named, got = both("swiglu_quantise", (normal(ROWS, 128), None, None, 1e4, None, zeros(ROWS, 64, dtype=F32), None))
    torch.testing.assert_close(got, named["out"])
    x = normal(ROWS, 64).clamp(-1, 1)
    named, got = both("quantise", (x, "fp8_32", None, zeros(ROWS, 64, dtype=U8), zeros(ROWS, 2, dtype=U8), None))
    torch.testing.assert_close(got.float(), dequantise(named["codes"], named["scales"], "fp8_32"), atol=0.07, rtol=0.07)
    assert torch_ops.torchs_own("quantise", named | {"format": "mxfp4_32"}) is None


def test_engram_rows():
    table = prepare_canonical("engram_table", CanonicalWeight("fp8_row32", *quantise(normal(20, 32), "fp8_32")))
    rows = torch.randint(0, 20, (ROWS, 3), generator=torch.Generator().manual_seed(3))
    named, got = both("engram_lookup", (rows, table, None, zeros(ROWS, 96, dtype=U8), zeros(ROWS, 3, dtype=U8)))
    assert torch.equal(got.view(ROWS, 96), named["out"])


def test_unpermute():
    inverse = seeded(ROWS * 3).view(ROWS, 3)
    args = (normal(ROWS * 3, 64), inverse, normal(ROWS, 64), None, zeros(ROWS, 64, dtype=F32))
    named, got = both("unpermute", args)
    torch.testing.assert_close(got, named["out"])


def test_route_topk_finds_the_experts_where_no_bias_chooses():
    args = (normal(ROWS, 32), zeros(32, dtype=F32), 4, 1.5, None, None, zeros(ROWS, 4), zeros(ROWS, 4, dtype=F32), zeros(32))
    named, got = both("route_topk", args)
    assert torch.equal(got.indices.int(), named["ids"])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "kept"),
    [(0.0, 0, 1.0, 0.0, {3}), (1.0, 2, 1.0, 0.0, {3, 5}), (1.0, 0, 0.7, 0.0, {3, 5}), (1.0, 0, 1.0, 0.5, {3, 5}),
     (0.7, 3, 0.7, 0.1, {3, 5}), (1.0, 0, 1.0, 0.0, {3, 5, 1})],
)  # fmt: skip
def test_sampling_draws_what_its_filters_leave(temperature, top_k, top_p, min_p, kept):
    row = torch.full((16,), -30.0)
    row[3], row[5], row[1] = 2.0, 1.9, 0.1
    rows = 400
    filters = [torch.full((rows,), value) for value in (temperature, top_k, top_p, min_p)]
    filters[1] = filters[1].int()
    draws = (zeros(rows, dtype=I64), torch.arange(rows).int(), 0, zeros(rows))
    named, got = both("sample", (row.expand(rows, 16), *filters, *draws))
    assert set(got.tolist()) == set(named["tokens"].tolist()) == kept


def test_a_higher_temperature_draws_the_likeliest_less_often():
    logits = torch.tensor([1.0, 0.0]).expand(2000, 2)
    off = (torch.zeros(2000, dtype=I32), torch.ones(2000), torch.zeros(2000))
    draws = (zeros(2000, dtype=I64), torch.arange(2000).int(), 0, zeros(2000))
    torch.manual_seed(0)
    for temperature, likely in ((0.5, 0.881), (2.0, 0.622)):
        named, got = both("sample", (logits, torch.full((2000,), temperature), *off, *draws))
        assert abs((got == 0).float().mean() - likely) < 0.05 and abs((named["tokens"] == 0).float().mean() - likely) < 0.05


def test_log_probabilities_and_nan_rows():
    logits = normal(ROWS, 100)
    args = (logits, zeros(ROWS), zeros(ROWS, dtype=F32), zeros(ROWS), zeros(ROWS, 5), zeros(ROWS, 5, dtype=F32))
    named, got = both("top_logprobs", args)
    assert torch.equal(got.indices.int(), named["ids"])
    torch.testing.assert_close(got.values, named["values"])
    logits[2, 7] = float("nan")
    logits[3, 1], logits[4] = float("inf"), float("-inf")
    named, got = both("nan_row_flags", (logits, zeros(ROWS, dtype=U8)))
    assert torch.equal(got, named["flags"].bool()) and got.sum() == 3


def test_only_a_mask_of_tokens_has_an_operator():
    mask = torch.randint(-(2**31), 2**31, (ROWS, 4), generator=torch.Generator().manual_seed(1)).int()
    off = (torch.full((ROWS,), 1.0), zeros(ROWS, dtype=F32), zeros(ROWS, dtype=F32))
    history = (zeros(ROWS, 8), torch.arange(ROWS).int(), zeros(ROWS), zeros(ROWS))
    no_bias = (zeros(ROWS + 1), zeros(0), zeros(0, dtype=F32))
    named, got = both("mask_logits", (*history, *off, *no_bias, mask, normal(ROWS, 128)))
    assert torch.equal(got, named["logits"])
    assert torch_ops.torchs_own("mask_logits", {"allowed": None}) is None
    assert torch_ops.torchs_own("residual_site", {}) is None


def test_drafting():
    named, got = both("draft_features", (normal(ROWS, 4, 32), None, zeros(ROWS, 32, dtype=F32)))
    torch.testing.assert_close(got, named["out"])
    tables = [prepare_canonical("markov", CanonicalWeight("bf16", normal(64, 16, dtype=BF16))) for _ in "eh"]
    prev = torch.arange(ROWS).int()
    out = (zeros(ROWS, 64, dtype=F32), zeros(ROWS, 16, dtype=BF16))
    named, got = both("markov_logits", (normal(ROWS, 64), prev, *tables, *out))
    torch.testing.assert_close(got, named["out"], atol=0.05, rtol=0.02)
    args = (normal(ROWS, 32), normal(ROWS, 16), normal(1, 48), 1.5, zeros(ROWS, dtype=F32), zeros(ROWS, dtype=F32))
    named, got = both("confidence_head", args)
    torch.testing.assert_close(got, named["probability"])


@pytest.mark.parametrize(("op", "store"), [("copy_blocks", "cache"), ("snapshot_state", "state")])
def test_copies_within_a_store(op, store):
    order = seeded(8)
    named, got = both(op, (order[:4].clone(), order[4:].clone(), torch.arange(8 * 16).view(8, 16).to(U8)))
    assert torch.equal(got, named[store])


def test_copies_between_stores_and_tokens():
    rows = seeded(8)
    args = (torch.arange(8 * 16).view(8, 16).to(U8), rows[:4].clone(), rows[4:].clone(), zeros(8, 16, dtype=U8))
    named, got = both("copy_rows", args)
    assert torch.equal(got, named["dst"])
    request = torch.arange(ROWS).int()
    history = torch.arange(ROWS * 10).view(ROWS, 10).int()
    named, got = both("gather_tokens", (history, request.flip(0), request, request + 2, None, zeros(ROWS), zeros(ROWS, 4)))
    assert torch.equal(got, named["ids"])


def test_attention_in_both_ways():
    q, keys = normal(3, 4, 16), normal(3, 16, 16)
    wanted = torch.softmax(torch.einsum("thd,tkd->thk", q, keys) / 4, dim=-1) @ keys
    for way in torch_ops.attention(q, keys):
        torch.testing.assert_close(way.call(), wanted)


def test_keys_of_no_weight_fill_products_up():
    q, keys = normal(3, 4, 16), normal(3, 13, 16)
    wanted = torch.softmax(torch.einsum("thd,tkd->thk", q, keys) / 4, dim=-1) @ keys
    for way in torch_ops.attention(q, keys):
        torch.testing.assert_close(way.call(), wanted)


def test_draft_attention_has_the_keys_of_window_and_block(monkeypatch):
    asked = []
    monkeypatch.setattr(torch_ops, "attention", lambda q, keys: asked.append((q.shape, keys.shape)) or [None])
    torch_ops.torchs_own("draft_attention", {"anchor": zeros(3), "q": normal(15, 4, 32), "window_tokens": 128, "draft_block": 5})
    assert asked == [((3, 20, 32), (3, 133, 32))]


@pytest.mark.parametrize("shared", [False, True])
def test_index_scores_in_parts(shared):
    q, weights, keys = normal(5, 4, 16), normal(5, 4), normal(1 if shared else 5, 20, 16)
    wanted = torch.einsum("th,thk->tk", weights, torch.einsum("thd,tkd->thk", q, keys.expand(5, -1, -1)).relu())
    torch.testing.assert_close(torch_ops.index_scores(q, weights, keys, most_rows=2).call(), wanted)
