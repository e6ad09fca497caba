"""The GEMM and mixture-of-experts cards: every case against float64, and against small independent formulations."""

import math

import numpy as np
import pytest
import torch
from deepinfer_hal import formats
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import prepare_canonical

from tests.conformance.harness import assert_row_independent, case_id, cases_of, run_case

NAMES = (
    "linear",
    "grouped_linear",
    "grouped_gemm",
    "route_topk",
    "permute",
    "swiglu_quantise",
    "unpermute",
    "moe_layer",
)


@pytest.mark.parametrize(("card", "case"), cases_of(*NAMES), ids=case_id)
def test_case(card, case):
    run_case(card, case)


@pytest.mark.parametrize(("card", "case"), cases_of("unpermute"), ids=case_id)
def test_rows_do_not_depend_on_later_rows(card, case):
    assert_row_independent(card, case)


def made(op, seed=0, **params):
    card = get_card(op)
    return card, card.generate(Case(op, params), seed, "cpu", prepare_canonical)


def run(op, **params):
    card, args = made(op, **params)
    card.reference(*args.values())
    return args


def f64(x):
    return x.double().numpy()


def dense(codes, scales):
    return f64(formats.dequantise(codes, scales, "fp8_32"))


def test_linear_of_codes_multiplies_decoded_values():
    args = run("linear", T=3, K=96, N=40, x="u8", w="fp8_block32", out="f32")
    weight = args["weight"].canonical()
    scale = 2.0 ** (weight.scales.numpy().astype(float) - 127)
    w = f64(formats.E4M3_VALUES()[weight.values.long()]) * np.kron(scale, np.ones((32, 32)))[:40, :96]
    np.testing.assert_allclose(f64(args["out"]), dense(args["x"], args["x_scale"]) @ w.T, atol=1e-5)


FAR_CASES = [
    (card, case) for name in ("linear", "grouped_linear", "grouped_gemm") for card, case in cases_of(name) if "far" in case.params
]


@pytest.mark.parametrize(("card", "case"), FAR_CASES, ids=case_id)
def test_far_scales_keep_the_size_of_sums_and_a_tolerance_that_tells_a_lost_group(card, case):
    args = card.generate(case, 0, "cpu", prepare_canonical)
    spread = args["x_scale"].int().amax(0) - args["x_scale"].int().amin()
    assert int(spread.max()) >= 100 and len(spread.unique()) > 2
    args |= {"out": torch.zeros(args["out"].shape), "out_scale": None}
    card.reference(*args.values())
    right, tolerance = args["out"].clone(), card.tolerance(args, "out")
    assert right.isfinite().all() and 0.1 < right.std() < 10
    args["x"][:, 32:64] = 0  # some of the columns, whatever their scale is
    card.reference(*args.values())
    allowed = tolerance.atol + tolerance.rtol * right.abs()
    assert ((args["out"] - right).abs() > allowed)[:, : case.params["N"]].float().mean() > 0.9


def test_linear_quantises_straight_from_the_sum():
    coded = run("linear", T=9, K=64, N=64, x="f32", w="f32", out="u8")
    plain = made("linear", T=9, K=64, N=64, x="f32", w="f32", out="u8")[1]
    plain["out"], plain["out_scale"] = torch.empty(9, 64), None
    get_card("linear").reference(*plain.values())
    codes, scales = formats.quantise(plain["out"], "fp8_32")
    assert torch.equal(codes, coded["out"]) and torch.equal(scales, coded["out_scale"])


def test_grouped_linear_is_block_diagonal():
    args = run("grouped_linear", T=3, G=2, K=64, N=32, x="f32", w="f32", out="f32")
    x, w = f64(args["x"]), f64(args["weight"].dequantise())
    for group in range(2):
        expected = x[:, group * 64 : (group + 1) * 64] @ w[group].T
        np.testing.assert_allclose(f64(args["out"][:, group * 32 : (group + 1) * 32]), expected, atol=1e-5)


def test_grouped_gemm_sends_each_run_of_rows_to_its_expert():
    args = run("grouped_gemm", M=20, E=5, K=64, N=32, x="u8", w="fp4_row32", out="f32", spare=4)
    x, w, bounds = dense(args["x"], args["x_scale"]), f64(args["weight"].dequantise()), args["offsets"].tolist()
    for row in range(20):
        expert = next(e for e in range(5) if bounds[e] <= row < bounds[e + 1])
        np.testing.assert_allclose(f64(args["out"][row]), w[expert] @ x[row], atol=1e-5)
    assert args["out"][20:].isnan().all()


def softplus(x):
    return x if x > 20 else math.log1p(math.exp(x))


def test_routing_equals_loops_with_ties_to_the_lower_id():
    args = run("route_topk", T=20, E=32, k=6, ties=True)
    tied = 0
    for t in range(20):
        u = [math.sqrt(softplus(x)) for x in args["logits"][t].tolist()]
        order = sorted(range(32), key=lambda e: (-u[e], e))
        tied += u[order[5]] == u[order[6]]
        assert args["ids"][t].tolist() == order[:6]
        total = sum(u[e] for e in order[:6])
        np.testing.assert_allclose(f64(args["weights"][t]), [u[e] / total * 1.5 for e in order[:6]], rtol=1e-6)
    assert tied > 3, "the case must have ties at the boundary"
    assert args["counts"].tolist() == np.bincount(args["ids"].flatten().numpy(), minlength=32).tolist()


def test_the_bias_chooses_but_does_not_weigh():
    card, args = made("route_topk", T=1, E=8, k=2)
    args["logits"].zero_()
    args["bias"].zero_()[5], args["bias"][3] = 2.0, 1.0
    card.reference(*args.values())
    assert args["ids"].tolist() == [[5, 3]]
    assert args["weights"].tolist() == [[0.75, 0.75]]


def test_softplus_of_large_logits_is_the_identity():
    card, args = made("route_topk", T=1, E=8, k=2)
    args["logits"].fill_(-100.0)[0, 1], args["logits"][0, 2] = 1e4, 4e4
    args["bias"].zero_()
    card.reference(*args.values())
    assert args["ids"].tolist() == [[2, 1]]
    assert args["weights"].tolist() == [[1.0, 0.5]]


def test_experts_are_renamed_and_dropped_by_the_map():
    args = run("route_topk", T=33, E=8, k=2, P=12)
    plain = made("route_topk", T=33, E=8, k=2, P=12)[1]
    mapping, plain["expert_map"] = plain["expert_map"], None
    plain["counts"] = torch.zeros(8, dtype=torch.int32)
    get_card("route_topk").reference(*plain.values())
    assert torch.equal(args["ids"], mapping[plain["ids"].long()]) and (args["ids"] == -1).any()
    for physical in range(12):
        assert int(args["counts"][physical]) == int((args["ids"] == physical).sum())


def test_permute_is_a_stable_sort_and_its_inverse():
    args = run("permute", T=15, K=32, E=4, k=2, x="bf16", holes=True)
    pairs = [(e, t * 2 + j) for t, row in enumerate(args["ids"].tolist()) for j, e in enumerate(row) if e >= 0]
    expected = [place for _, place in sorted(pairs)]
    rows = len(expected)
    assert args["source"][:rows].tolist() == expected
    assert torch.equal(args["out"][:rows], args["x"][torch.tensor(expected) // 2])
    assert args["offsets"].tolist() == [sum(e < bound for e, _ in pairs) for bound in range(5)]
    for place in range(30):
        row = int(args["inverse"].flatten()[place])
        assert row == (expected.index(place) if place in expected else -1)


def test_swiglu_clamps_and_weighs_before_rounding():
    card, args = made("swiglu_quantise", M=3, I=32, x="f32", out="f32", weighed=True)
    args["gate_up"][0, :32], args["gate_up"][0, 32:] = 50.0, -50.0
    args["gate_up"][1, :32] = -50.0
    card.reference(*args.values())
    w = args["weights"][args["source"].long()]
    silu = 10 / (1 + math.exp(-10))
    torch.testing.assert_close(args["out"][0], (-10 * silu * w[0]).expand(32))
    assert (args["out"][1].abs() < 1e-18).all(), "only the upper side of the gate is clamped"
    gate, up = f64(args["gate_up"][2, :32]), f64(args["gate_up"][2, 32:])
    expected = np.minimum(gate, 10) / (1 + np.exp(-np.minimum(gate, 10))) * np.clip(up, -10, 10) * float(w[2])
    np.testing.assert_allclose(f64(args["out"][2]), expected, rtol=2e-6, atol=1e-7)


def test_unpermute_adds_in_the_order_of_the_choices():
    card, args = made("unpermute", T=1, H=4, k=3, dtype="f32", shared=True)
    args["rows"][:] = torch.tensor([[1e8], [1.0], [-1e8]])
    args["shared"].fill_(0.5)
    args["inverse"][0] = torch.tensor([0, 2, 1])
    card.reference(*args.values())
    assert args["out"].tolist() == [[1.5] * 4]
    args["inverse"][0] = torch.tensor([0, 1, -1])
    card.reference(*args.values())
    assert args["out"].tolist() == [[1e8] * 4]


def test_moe_layer_equals_one_token_at_a_time():
    args = run("moe_layer", T=6, H=64, E=8, k=2, I=32, dtype="f32", codes=False)
    names = ("gate", "gate_up", "down", "shared_gate_up", "shared_down")
    gate, gate_up, down, shared_up, shared_down = (f64(args[n].dequantise()) for n in names)

    def ffn(x, up, out, weight):
        width = up.shape[0] // 2
        a, b = np.minimum(up[:width] @ x, 10), np.clip(up[width:] @ x, -10, 10)
        return out @ (a / (1 + np.exp(-a)) * b * weight)

    for t in range(6):
        x = f64(args["x"][t])
        u = np.array([math.sqrt(softplus(v)) for v in gate @ x])
        chosen = np.argsort(-(u + f64(args["bias"])), kind="stable")[:2]
        y = ffn(x, shared_up, shared_down, 1.0)
        y = y + sum(ffn(x, gate_up[e], down[e], u[e] / u[chosen].sum() * 1.5) for e in chosen)
        np.testing.assert_allclose(f64(args["out"][t]), y, atol=1e-5)
    assert int(args["counts"].sum()) == 12


def test_moe_layer_with_codes_reads_the_codes_and_routes_on_the_dense_input():
    card, args = made("moe_layer", T=5, H=64, E=8, k=2, I=32, dtype="bf16", codes=True)
    _, other = made("moe_layer", T=5, H=64, E=8, k=2, I=32, dtype="bf16", codes=True)
    other["x_codes"].zero_()
    card.reference(*args.values())
    card.reference(*other.values())
    assert torch.equal(args["counts"], other["counts"])
    assert args["out"].abs().sum() > 0 and other["out"].abs().sum() == 0


@pytest.mark.parametrize(
    ("op", "params", "change", "message"),
    [
        ("linear", dict(T=2, K=64, N=32, x="u8", w="bf16", out="f32"), {"x_scale": None}, "x_scale must be given"),
        ("linear", dict(T=2, K=64, N=32, x="bf16", w="bf16", out="f32"), {"x": torch.ones(2, 32)}, "K = 64"),
        ("linear", dict(T=2, K=64, N=32, x="u8", w="bf16", out="f32"), {"x": torch.ones(2, 64)}, "must be uint8"),
        ("grouped_gemm", dict(M=2, E=4, K=64, N=32, x="f32", w="f32", out="f32"), {"out": torch.ones(3, 32)}, "M = 3"),
        ("route_topk", dict(T=2, E=8, k=2), {"k": 3}, "k = 3"),
        ("route_topk", dict(T=2, E=8, k=2), {"counts": torch.zeros(9, dtype=torch.int32)}, "counts needs 8"),
        ("permute", dict(T=2, K=32, E=4, k=2, x="bf16"), {"out": torch.ones(4, 32)}, "x's dtype"),
        ("permute", dict(T=2, K=32, E=4, k=2, x="bf16"), {"experts": 5}, "experts\\+1 = 6"),
        ("swiglu_quantise", dict(M=2, I=32, x="f32", out="f32", weighed=True), {"source": None}, "go together"),
    ],
)
def test_bad_calls_are_named_before_anything_runs(op, params, change, message):
    card, args = made(op, **params)
    with pytest.raises(BadCall, match=message):
        check_call(card, {**args, **change})
