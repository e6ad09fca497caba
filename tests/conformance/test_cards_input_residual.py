"""The input and residual cards: every case against float64, and against small independent formulations."""

import ml_dtypes
import numpy as np
import pytest
import torch
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, prepare_canonical

from tests.conformance.harness import assert_row_independent, case_id, cases_of, run_case

NAMES = (
    "embedding_gather",
    "engram_hash",
    "engram_lookup",
    "engram_gate",
    "rms_norm",
    "rope",
    "quantise",
    "dequantise",
    "hyper_connection_pre",
    "hyper_connection_post",
    "stream_collapse",
    "residual_site",
)


@pytest.mark.parametrize(("card", "case"), cases_of(*NAMES), ids=case_id)
def test_case(card, case):
    run_case(card, case)


@pytest.mark.parametrize(
    ("card", "case"), [pair for pair in cases_of(*NAMES) if pair[0].reference_invariant == "yes"], ids=case_id
)
def test_rows_do_not_depend_on_later_rows(card, case):
    assert_row_independent(card, case)


def made(op, seed=0, **params):
    """Arguments of a case, and the card; the reference has not run."""
    card = get_card(op)
    return card, card.generate(Case(op, params), seed, "cpu", prepare_canonical)


def run(op, **params):
    """(arguments after the reference ran, a copy from before)."""
    card, args = made(op, **params)
    _, before = made(op, **params)
    card.reference(*args.values())
    return args, before


def f64(x):
    return x.double().numpy()


def test_embedding_copies_the_row_to_every_stream_and_zeroes_bad_ids():
    args, _ = run("embedding_gather", T=9, V=20, H=32, m=4, w="bf16", out="bf16")
    table = args["table"].dequantise()
    for t, token in enumerate(args["ids"].tolist()):
        for stream in args["out"][t].float():
            expected = table[token] if 0 <= token < 20 else torch.zeros(32)
            assert torch.equal(stream, expected)


def test_engram_hash_equals_python_integers():
    args, _ = run("engram_hash", T=12, N=4, Q=8, V=99092, released=True)
    mults, primes, offsets = (args[n].tolist() for n in ("multipliers", "primes", "offsets"))
    for t, window in enumerate(args["ngrams"].tolist()):
        stop = next((i for i, token in enumerate(window) if token < 0), 4)
        ids = [int(args["token_map"][token]) if i < stop else 2 for i, token in enumerate(window)]
        mixed, row = ids[0] * mults[0], []
        for r in range(1, 4):
            mixed ^= ids[r] * mults[r]
            row += [mixed % primes[(r - 1) * 8 + h] + offsets[(r - 1) * 8 + h] for h in range(8)]
        assert args["out"][t].tolist() == row


def test_engram_hash_of_the_documented_multipliers():
    """One token after the start of a sequence, worked by hand with layer 1's multipliers."""
    card = get_card("engram_hash")
    mults = [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    out = torch.zeros(1, 3, dtype=torch.int64)
    ngrams = torch.tensor([[5, 7, -1, 3]], dtype=torch.int32)
    card.reference(
        ngrams,
        torch.arange(10, dtype=torch.int32) + 10,
        torch.tensor(mults),
        torch.tensor([101, 103, 107]),
        torch.tensor([0, 101, 204]),
        12,
        None,
        out,
    )
    bigram = 15 * mults[0] ^ 17 * mults[1]
    trigram = bigram ^ 12 * mults[2]
    fourgram = trigram ^ 12 * mults[3]
    assert out[0].tolist() == [bigram % 101, trigram % 103 + 101, fourgram % 107 + 204]


def test_engram_lookup_copies_stored_bytes_and_zeroes_rows_outside():
    args, _ = run("engram_lookup", T=4, C=3, rows=20, d=64, out="u8")
    stored = args["table"].canonical()
    for t, rows in enumerate(args["rows"].tolist()):
        for i, row in enumerate(rows):
            codes = args["out"][t, i * 64 : (i + 1) * 64]
            scales = args["out_scale"][t, i * 2 : (i + 1) * 2]
            inside = 0 <= row < 20
            assert torch.equal(codes, stored.values[row] if inside else torch.zeros(64, dtype=torch.uint8))
            assert torch.equal(scales, stored.scales[row] if inside else torch.full((2,), 127, dtype=torch.uint8))


def test_engram_gate_equals_loops():
    args, before = run("engram_gate", T=3, m=4, H=64, dtype="f32")
    kv, streams, qw, kw = (f64(before[n]) for n in ("kv", "streams", "q_weight", "k_weight"))
    for t in range(3):
        value = kv[t, 4 * 64 :]
        for j in range(4):
            s, k = streams[t, j], kv[t, j * 64 : (j + 1) * 64]
            dot = (s * qw[j] * k * kw[j]).sum() / np.sqrt((s**2).mean()) / np.sqrt((k**2).mean()) / 8
            gate = 1 / (1 + np.exp(-np.sign(dot) * np.sqrt(max(abs(dot), 1e-6))))
            np.testing.assert_allclose(f64(args["streams"][t, j]), s + gate * value, rtol=1e-5, atol=1e-5)


def test_engram_gate_of_a_zero_dot_is_one_half():
    args, before = run("engram_gate", T=2, m=2, H=64, dtype="f32", zero_keys=True)
    expected = before["streams"] + 0.5 * before["kv"][:, None, 128:]
    assert torch.equal(args["streams"], expected)


def test_rms_norm_multiplies_the_weight_before_its_only_rounding():
    args, _ = run("rms_norm", T=4, N=64, x="bf16", out="bf16")
    x, weight = f64(args["x"]), f64(args["weight"])
    exact = weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-20)
    assert np.array_equal(f64(args["out"]), exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64))


def test_rms_norm_codes_come_from_the_rounded_value():
    args, _ = run("rms_norm", T=6, N=64, x="bf16", out="bf16", codes=True)
    codes, scales = torch.empty_like(args["out_codes"]), torch.empty_like(args["out_scales"])
    get_card("quantise").reference(args["out"], "fp8_32", None, codes, scales)
    assert torch.equal(codes, args["out_codes"]) and torch.equal(scales, args["out_scales"])


@pytest.mark.parametrize("inverse", [False, True])
def test_rope_is_multiplication_of_adjacent_pairs_by_a_phase(inverse):
    args, before = run("rope", T=8, h=3, D=32, r=16, dtype="f32", inverse=inverse)
    x, y = f64(before["x"]), f64(args["x"])
    for t, position in enumerate(before["positions"].tolist()):
        if position < 0:
            assert np.array_equal(x[t], y[t])
            continue
        phase = np.exp((-1j if inverse else 1j) * position * 10000.0 ** (-np.arange(0, 16, 2) / 16))
        pairs = (x[t, :, 16::2] + 1j * x[t, :, 17::2]) * phase
        assert np.array_equal(x[t, :, :16], y[t, :, :16])
        np.testing.assert_allclose(y[t, :, 16::2], pairs.real, atol=1e-6)
        np.testing.assert_allclose(y[t, :, 17::2], pairs.imag, atol=1e-6)


def test_rope_inverse_undoes_rope():
    card, args = made("rope", T=5, h=2, D=64, r=64, dtype="f32", inverse=False)
    start = args["x"].clone()
    card.reference(*args.values())
    card.reference(*{**args, "inverse": True}.values())
    torch.testing.assert_close(args["x"], start, atol=1e-6, rtol=0)


def test_quantise_flags_rows_with_nan_or_infinity_and_keeps_other_bits():
    args, _ = run("quantise", T=5, N=128, format="mxfp4_32", dtype="f32")
    assert args["flags"].tolist() == [4, 5, 5, 4, 4]


def test_quantise_then_dequantise_is_within_half_a_step():
    for fmt, step in (("fp8_32", 2**-4), ("mxfp4_32", 2**-2), ("fp4_16", 2**-2)):
        args, _ = run("quantise", seed=3, T=40, N=64, format=fmt, dtype="f32")
        y = torch.empty(40, 64)
        get_card("dequantise").reference(args["codes"], args["scales"], fmt, None, y)
        x, y = args["x"][3:], y[3:]
        largest = x.unflatten(-1, (-1, 16 if fmt == "fp4_16" else 32)).abs().amax(-1, keepdim=True)
        error = (x - y).unflatten(-1, (-1, 16 if fmt == "fp4_16" else 32)).abs()
        assert (error <= step * largest.clamp(min=0.02)).all(), fmt


def sinkhorn_loops(k, eps, iterations):
    k = np.exp(k - k.max(-1, keepdims=True))
    k = k / k.sum(-1, keepdims=True) + eps
    k /= k.sum(0, keepdims=True) + eps
    for _ in range(iterations - 1):
        k /= k.sum(1, keepdims=True) + eps
        k /= k.sum(0, keepdims=True) + eps
    return k


def test_hyper_connection_pre_equals_loops():
    args, before = run("hyper_connection_pre", T=3, m=4, H=32, dtype="f32")
    fn, base, scale = (f64(before[n]) for n in ("fn", "base", "scale"))
    for t in range(3):
        f = f64(before["streams"][t]).reshape(-1)
        z = fn @ f / np.sqrt((f**2).mean())
        z = z * np.repeat(scale, (4, 4, 16)) + base
        sigmoid = 1 / (1 + np.exp(-z[:8]))
        close = dict(rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(f64(args["pre"][t]), sigmoid[:4] + 1e-6, **close)
        np.testing.assert_allclose(f64(args["post"][t]), 2 * sigmoid[4:], **close)
        np.testing.assert_allclose(f64(args["comb"][t]), sinkhorn_loops(z[8:].reshape(4, 4), 1e-6, 20), **close)
        mixed = f64(before["pre_prev"][t]) @ f64(before["streams"][t])
        np.testing.assert_allclose(f64(args["out"][t]), mixed, **close)


def test_comb_is_nearly_doubly_stochastic():
    args, _ = run("hyper_connection_pre", T=16, m=4, H=32, dtype="f32")
    for axis in (-1, -2):
        assert ((args["comb"].sum(axis) - 1).abs() < 1e-3).all()


def test_hyper_connection_pre_may_overwrite_the_previous_pre():
    card, apart = made("hyper_connection_pre", T=3, m=4, H=32, dtype="f32")
    _, shared = made("hyper_connection_pre", T=3, m=4, H=32, dtype="f32")
    shared["pre"] = shared["pre_prev"]
    card.reference(*apart.values())
    card.reference(*shared.values())
    assert torch.equal(apart["out"], shared["out"]) and torch.equal(apart["pre"], shared["pre"])


def test_hyper_connection_post_sums_over_the_first_index_of_comb():
    args, before = run("hyper_connection_post", T=3, m=4, H=16, dtype="f32")
    y, post, comb, s = (f64(before[n]) for n in ("y", "post", "comb", "streams"))
    for t in range(3):
        for k in range(4):
            new = post[t, k] * y[t] + sum(comb[t, i, k] * s[t, i] for i in range(4))
            np.testing.assert_allclose(f64(args["streams"][t, k]), new, atol=2e-6)


def test_stream_collapse_of_a_one_hot_is_that_stream():
    card, args = made("stream_collapse", T=3, m=4, H=16, dtype="bf16")
    args["pre"].zero_()[:, 2] = 1
    card.reference(*args.values())
    assert torch.equal(args["out"], args["streams"][:, 2])


def test_residual_site_is_its_three_parts():
    args, before = run("residual_site", T=4, m=4, H=64, dtype="bf16", codes=True)
    streams, out = before["streams"], before["out"]
    get_card("hyper_connection_post").reference(before["y"], before["post"], before["comb"], None, streams)
    mixed = (before["pre_prev"][..., None] * streams.float()).sum(1).bfloat16()
    get_card("rms_norm").reference(mixed, before["norm_weight"], 1e-20, None, out)
    assert torch.equal(args["streams"], streams)
    assert (args["out"] == out).float().mean() > 0.98  # the sum over streams above has another order


def test_residual_site_in_place_equals_apart():
    apart, _ = run("residual_site", T=4, m=4, H=64, dtype="bf16", codes=True)
    card, args = made("residual_site", T=4, m=4, H=64, dtype="bf16", codes=True)
    args.update(post_out=args["post"], comb_out=args["comb"], pre=args["pre_prev"])
    card.reference(*args.values())
    for name in ("streams", "out", "out_codes", "pre", "post_out", "comb_out"):
        assert torch.equal(args[name], apart[name]), name


@pytest.mark.parametrize(
    ("op", "params", "change", "message"),
    [
        ("rms_norm", dict(T=2, N=64, x="bf16", out="bf16"), {"out": None}, "both are None"),
        ("rms_norm", dict(T=2, N=64, x="bf16", out="bf16", codes=True), {"out_scales": None}, "scales must be given"),
        ("rms_norm", dict(T=2, N=64, x="bf16", out="bf16"), {"weight": torch.ones(63)}, "N = 63"),
        ("rope", dict(T=2, h=2, D=32, r=16, dtype="f32", inverse=False), {"table": torch.ones(4, 64)}, "at most"),
        ("quantise", dict(T=2, N=64, format="fp8_32", dtype="f32"), {"format": "fp9"}, "fp4_16"),
        ("quantise", dict(T=2, N=64, format="fp8_32", dtype="f32"), {"format": "mxfp4_32"}, "code and scale bytes"),
        ("residual_site", dict(T=2, m=4, H=32, dtype="f32", codes=False), {"post": None}, "go together"),
        ("engram_lookup", dict(T=2, C=3, rows=9, d=32, out="u8"), {"out_scale": None}, "out_scale must be given"),
    ],
)
def test_bad_calls_are_named_before_anything_runs(op, params, change, message):
    card, args = made(op, **params)
    with pytest.raises(BadCall, match=message):
        check_call(card, {**args, **change})


def test_engram_table_of_another_format_is_refused():
    card, args = made("engram_lookup", T=2, C=3, rows=9, d=32, out="f32")
    args["table"] = prepare_canonical("engram_table", CanonicalWeight("f32", torch.ones(9, 32)))
    with pytest.raises(BadCall, match="fp8_row32"):
        check_call(card, args)
