"""linear, grouped_linear and grouped_gemm on the twin: every pair of formats, tails, slabs, prepared weights, tiling."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "backends/ascend"), str(ROOT / "tests/conformance")]

from deepinfer_ascend import twin, weights  # noqa: E402
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend  # noqa: E402
from deepinfer_ascend.estimate import estimate, find_chip, find_problem  # noqa: E402
from deepinfer_hal import formats  # noqa: E402
from deepinfer_hal.card import Case, get_card  # noqa: E402
from deepinfer_hal.errors import BackendError  # noqa: E402
from deepinfer_hal.weights import CanonicalWeight  # noqa: E402
from harness import run_case  # noqa: E402

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))


def prepare(role, canonical):
    return AscendBackend().prepare_weight(TWIN_INDEX, role, canonical)


def check(op: str, **params) -> None:
    run_case(get_card(op), Case(op, params), twin.bind(get_card(op)), prepare=prepare)


def random_bytes(seed: int, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def fp4(seed: int, *shape: int) -> CanonicalWeight:
    *lead, n, k = shape
    scales = random_bytes(seed + 1, *lead, n, k // 32, low=112, high=124)
    return CanonicalWeight("fp4_row32", random_bytes(seed, *lead, n, k // 2), scales)


@pytest.mark.parametrize("w", ["bf16", "f32", "fp8_block32", "fp4_row32"])
@pytest.mark.parametrize("x", ["bf16", "f32", "u8"])
def test_every_pair_of_formats_with_tails_in_rows_columns_and_k(x, w):
    check("linear", T=19, K=160, N=70, x=x, w=w, out="f32")
    check("grouped_linear", T=5, G=3, K=96, N=32, x=x, w=w, out="bf16")


@pytest.mark.parametrize(("x", "w"), [("bf16", "bf16"), ("f32", "f32"), ("f32", "bf16"), ("bf16", "f32")])
def test_k_of_dense_operands_may_be_anything(x, w):
    check("linear", T=3, K=75, N=33, x=x, w=w, out="f32")


@pytest.mark.parametrize(("x", "w"), [("u8", "fp8_block32"), ("u8", "fp4_row32"), ("f32", "fp4_row32")])
def test_more_rows_and_columns_than_a_tile_holds(x, w):
    check("linear", T=300, K=320, N=400, x=x, w=w, out="bf16")
    check("grouped_gemm", M=290, E=3, K=128, N=272, x=x, w=w, out="bf16", spare=3, one_expert=1)


def test_rows_that_pass_the_workspace_go_in_slabs():
    """A float32 row of 32768 columns takes 128 KiB, and the workspace has 64 MiB: 512 rows fit."""
    card = get_card("linear")
    case = Case("linear", dict(T=516, K=64, N=32768, x="u8", w="fp4_row32", out="u8", count=515))
    args = card.generate(case, 4, "cpu", prepare)
    twin.bind(card)(**args)
    untouched = torch.full((32768,), 0xAA, dtype=torch.uint8)
    assert torch.equal(args["out"][515], untouched)
    for row in (0, 511, 512, 514):
        codes, scales = torch.empty(1, 32768, dtype=torch.uint8), torch.empty(1, 1024, dtype=torch.uint8)
        one = dict(args, x=args["x"][row : row + 1], x_scale=args["x_scale"][row : row + 1], count=None)
        twin.bind(card)(**dict(one, out=codes, out_scale=scales))
        assert torch.equal(codes[0], args["out"][row]) and torch.equal(scales[0], args["out_scale"][row])


@pytest.mark.parametrize(("rows", "n"), [(1, 64), (37, 192), (290, 448)])
def test_a_result_quantised_on_its_way_out_has_the_bits_of_one_that_is_quantised_later(rows, n):
    card = get_card("linear")
    args = card.generate(Case("linear", dict(T=rows, K=128, N=n, x="u8", w="fp8_block32", out="u8")), 6, "cpu", prepare)
    args["x_scale"][rows // 2] = 255  # a row of NaN
    args["x"][rows - 1] = 0 if rows > 1 else args["x"][rows - 1]
    wide = torch.empty(rows, n)
    for cores, seed in ((36, 1), (3, 8)):
        stream = twin.module().Stream(cores=cores, seed=seed)
        twin.bind(card)(**args, stream=stream)
        twin.bind(card)(**dict(args, out=wide, out_scale=None), stream=stream)
        codes, scales = formats.quantise(wide, "fp8_32")
        assert torch.equal(args["out"], codes) and torch.equal(args["out_scale"], scales)
    assert bool((scales[rows // 2] == 255).all())


def test_every_fp4_code_and_scale_reaches_the_product_exactly():
    """One-hot rows of 1.0 pick columns of W out: each must be the decoded weight, bit for bit."""
    n, k = 16, 64
    codes = torch.arange(n * k // 2).remainder(256).to(torch.uint8).reshape(n, k // 2)
    scales = torch.arange(3, 3 + 7 * n * 2, 7).reshape(n, k // 32).to(torch.uint8)
    stored = CanonicalWeight("fp4_row32", codes, scales)
    x = torch.eye(k).mul(0x38).to(torch.uint8)
    out = torch.empty(k, n)
    twin.bind(get_card("linear"))(x, torch.full((k, k // 32), 127, dtype=torch.uint8), prepare("w", stored), None, out, None)
    assert torch.equal(out.T, stored.dequantise())


@pytest.mark.parametrize("w", ["fp8_block32", "fp4_row32"])
def test_a_row_has_the_same_bits_alone_and_among_others_and_on_any_cores(w):
    card, rows = get_card("linear"), 270
    args = card.generate(Case("linear", dict(T=rows, K=192, N=160, x="u8", w=w, out="f32")), 3, "cpu", prepare)
    linear = twin.bind(card)
    linear(**args, stream=twin.module().Stream(cores=8, seed=5))
    for row in (0, 17, 255, 256, 269):
        alone = torch.empty(1, 160)
        part = dict(args, x=args["x"][row : row + 1], x_scale=args["x_scale"][row : row + 1], out=alone)
        linear(**part, stream=twin.module().Stream(cores=36, seed=row))
        assert torch.equal(alone[0], args["out"][row])


def test_the_shape_of_the_models_experts_is_served():
    """Gate and up of two experts of full size, 5120 to 2 * 2304; some columns against float64."""
    experts, n, k = 2, 4608, 5120
    stored = fp4(7, experts, n, k)
    x, x_scale = formats.quantise(torch.randn(6, k, generator=torch.Generator().manual_seed(9)), "fp8_32")
    offsets, out = torch.tensor([0, 4, 6], dtype=torch.int32), torch.empty(6, n)
    twin.bind(get_card("grouped_gemm"))(x, x_scale, prepare("experts_gate_up", stored), offsets, out, None)
    some = torch.tensor([0, 255, 256, 1000, 4607])
    for expert, rows in enumerate((slice(0, 4), slice(4, 6))):
        w = formats.dequantise_weight_fp4(stored.values[expert][some], stored.scales[expert][some]).double()
        expected = formats.dequantise(x[rows], x_scale[rows], "fp8_32").double() @ w.T
        assert (out[rows][:, some] - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("shape", [(70, 96), (16, 64), (3, 33, 160)])
def test_prepared_weights_give_the_checkpoints_bytes_back(shape):
    for format in ("fp8_block32", "fp4_row32"):
        *lead, n, k = shape
        values = random_bytes(1, *lead, n, k // 2 if format == "fp4_row32" else k)
        scales = random_bytes(2, *lead, *((-(-n // 32), -(-k // 32)) if format == "fp8_block32" else (n, k // 32)), high=240)
        handle = prepare("w", CanonicalWeight(format, values, scales))
        assert isinstance(handle, weights.CubeWeight)
        assert handle.nbytes == AscendBackend().prepared_nbytes("w", shape, format)
        found = [handle] + [handle.slot(i) for i in range(lead[0] if lead else 0)]
        wanted = [(values, scales)] + list(zip(values, scales, strict=True) if lead else [])
        for one, (v, s) in zip(found, wanted, strict=True):
            assert torch.equal(one.canonical().values, v) and torch.equal(one.canonical().scales, s)


def test_fp4_scales_that_the_shift_cannot_hold_stay_as_they_are_and_are_refused():
    stored = CanonicalWeight("fp4_row32", random_bytes(3, 16, 32), torch.full((16, 2), 250, dtype=torch.uint8))
    handle = prepare("w", stored)
    assert torch.equal(handle.canonical().scales, stored.scales)
    x, out = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 16)
    with pytest.raises(BackendError, match="FP4 scales below 2\\^122"):
        twin.bind(get_card("linear"))(x, None, handle, None, out, None)


def plan(n: int, groups: int, rows: int, cores: int, step: int = 16) -> list[int]:
    """Columns of a tile, cores in use, bytes of K in a stage."""
    found = (ctypes.c_int32 * 3)()
    ctypes.CDLL(twin.module().__file__).di_plan_matmul(*(ctypes.c_int64(i) for i in (n, groups, rows, cores, step)), found)
    return list(found)


def test_the_tiling_uses_every_core_for_few_rows_and_tall_wide_tiles_for_many():
    assert plan(5120, 1, 1, 32)[:2] == [160, 32]  # 32 tiles, one each
    assert plan(384, 1, 4, 32) == [16, 24, 2048]
    assert plan(512, 1, 4096, 32) == [256, 32, 256]  # 16 x 2 tiles: x is not read by all cores
    for n, groups, rows, cores in [(70, 3, 0, 8), (129280, 1, 1, 36), (4608, 384, 0, 32), (1, 1, 1, 36), (5120, 1, 100, 32)]:
        columns, blocks, chunk = plan(n, groups, rows, cores)
        assert columns % 16 == 0 and 16 <= columns <= 256 and 1 <= blocks <= cores
        assert columns < n + 16
        lines = max(columns, min(256, -(-rows // 16) * 16) if rows else 256)
        assert 256 <= chunk <= 2048 and lines * chunk <= 64 * 1024


def estimated(shape: str) -> dict:
    return estimate(find_problem("grouped_gemm", shape), find_chip("950DT"), sensitivity=False)


def test_by_estimate_few_tokens_stream_the_experts_and_many_keep_the_cube_busy():
    """Gate and up of V4.1's experts, N cut to 1024: 1.09 times the bytes bound and 82 % of the peak when this was written."""
    assert estimated("4-tokens-cut")["times_bytes_bound"] <= 1.2
    many = estimated("256-tokens-cut")
    assert many["share_of_peak"] >= 0.75 and many["binds"] == "M (cube)"
