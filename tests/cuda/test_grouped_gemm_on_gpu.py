"""Expert products on a Hopper GPU: against float64, the same bits in every form of the kernel, what has no fragments."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda import native, native_library, weights
from deepinfer_hal.c_abi import CLibrary
from deepinfer_hal.card import get_card, sum_tolerance
from deepinfer_hal.formats import dequantise, quantise
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not native_library.LIBRARY.is_file(),
    reason="needs a GPU of compute capability 9.0 and the built kernel library",
)

COUNTS = [100, 1, 0, 16, 7, 30, 40, 2]
"""Rows of eight experts: no, few and many, over and under every tile."""


@pytest.fixture
def gen():
    return torch.Generator("cuda").manual_seed(5)


@pytest.fixture
def call():
    return native.library(torch.device("cuda", 0)).bind(get_card("grouped_gemm"))


def experts(gen, count: int, rows: int, columns: int, low: int = 110, high: int = 122) -> WeightHandle:
    values = torch.randint(0, 256, (count, rows, columns // 2), generator=gen, device="cuda", dtype=torch.uint8)
    scales = torch.randint(low, high, (count, rows, columns // 32), generator=gen, device="cuda", dtype=torch.uint8)
    return weights.prepare("experts_down", CanonicalWeight("fp4_row32", values, scales))


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32).cuda()


def run(
    call, x: tuple[torch.Tensor, torch.Tensor | None], weight: WeightHandle, counts: list[int], dtype=torch.bfloat16
) -> torch.Tensor:
    out = torch.full((x[0].shape[0], weight.shape[1]), float("nan"), dtype=dtype, device="cuda")
    call(*x, weight, offsets_of(counts), out, None)
    torch.cuda.synchronize()
    return out


def assert_right(out: torch.Tensor, values: torch.Tensor, weight: WeightHandle, counts: list[int]) -> None:
    """`out` is x W^T of each row's expert at the card's tolerance, and untouched past the last."""
    start = 0
    for expert, count in enumerate(counts):
        rows, matrix = values[start : start + count].double(), weight.slot(expert).dequantise().double()
        if count:
            wanted = rows @ matrix.T
            allowed = sum_tolerance(out.dtype, matrix.shape[1], float(rows.abs().max() * matrix.abs().max()))
            error = (out[start : start + count].double() - wanted).abs()
            assert bool((error <= allowed.atol + allowed.rtol * wanted.abs()).all()), f"expert {expert}"
        start += count
    assert bool(out[start:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (4608, 5120), (320, 2304)])
def test_products_are_right_and_spare_rows_stay(rows, columns, coded, dtype, gen, call):
    x = torch.randn(sum(COUNTS) + 3, columns, generator=gen, device="cuda")
    given = quantise(x, "fp8_32") if coded else (x.bfloat16(), None)
    weight = experts(gen, len(COUNTS), rows, columns)
    assert isinstance(weight, weights.FragmentWeight)
    values = dequantise(*given, "fp8_32") if coded else given[0].float()
    assert_right(run(call, given, weight, COUNTS, dtype), values, weight, COUNTS)


# Forms follow the rows an expert and the granules of 64 features a block: of 132, these have at most 1, 8 and 10.
@pytest.mark.parametrize("features", [512, 7680, 10560])
def test_a_row_has_the_same_bits_alone_and_in_every_form(features, gen, call):
    weight, rows = experts(gen, len(COUNTS), features, 2304), sum(COUNTS)
    codes, scales = quantise(torch.randn(70 * len(COUNTS), 2304, generator=gen, device="cuda"), "fp8_32")
    expanded = dequantise(codes, scales, "fp8_32").bfloat16()
    forms = [
        run(call, x, weight, COUNTS)[:rows]
        for total in (rows, 40 * 8, 70 * 8)
        for x in ((codes[:total], scales[:total]), (expanded[:total], None))
    ]
    assert all(torch.equal(form, forms[0]) for form in forms)
    assert_right(forms[0], expanded[:rows].float(), weight, COUNTS)
    for row in (0, 99, 100, 101, 120, 150, rows - 1):
        expert = int((offsets_of(COUNTS)[1:] <= row).sum())
        alone = run(call, (codes[row : row + 1], scales[row : row + 1]), weight, [int(e == expert) for e in range(len(COUNTS))])
        assert torch.equal(alone[0], forms[0][row]), row


FEW_EXPERTS = (
    [8] * 6,
    [32, 20, 0, 17, 1, 30],
    [64, 40, 33, 50, 57, 64],
    [90, 40, 64, 70, 96, 100],
    [256] * 6,
    [300, 20, 129, 250, 64, 190],
    [1100, 600, 1, 700, 513, 600],
)
"""Rows of six: fewer than a tile has, a tile, several tiles and parts of them, and many."""


@pytest.mark.parametrize("counts", FEW_EXPERTS)
def test_rows_of_few_experts_have_the_bits_of_a_row_alone(counts, gen, call):
    weight = experts(gen, len(counts), 4608, 384)
    codes, scales = quantise(torch.randn(sum(counts) + 20, 384, generator=gen, device="cuda"), "fp8_32")
    out = run(call, (codes, scales), weight, counts)
    assert_right(out, dequantise(codes, scales, "fp8_32"), weight, counts)
    for row in (0, 7, 31, sum(counts) // 2, sum(counts) - 1):
        expert = int((offsets_of(counts)[1:] <= row).sum())
        alone = run(call, (codes[row : row + 1], scales[row : row + 1]), weight, [int(e == expert) for e in range(len(counts))])
        assert torch.equal(alone[0], out[row]), row


def test_a_small_workspace_takes_rows_in_parts(gen, call):
    weight, counts = experts(gen, len(COUNTS), 256, 5120), [500, *COUNTS[1:]]
    given = quantise(torch.randn(sum(counts), 5120, generator=gen, device="cuda"), "fp8_32")
    room = torch.empty(50 * 5120 * 2, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    small = CLibrary(native_library.LIBRARY, stream, pack_weight=weights.pack_weight, workspace=(room.data_ptr(), room.numel()))
    in_parts = run(small.bind(get_card("grouped_gemm")), given, weight, counts)
    assert torch.equal(in_parts, run(call, given, weight, counts))


@pytest.mark.parametrize("rows", [1, 16, 60])
def test_calls_that_overlap_read_their_own_rows(rows, gen, call):
    weight, counts = experts(gen, len(COUNTS), 512, 5120), [rows] * len(COUNTS)
    given = [quantise(torch.randn(sum(counts), 5120, generator=gen, device="cuda"), "fp8_32") for _ in range(3)]
    wanted = [run(call, x, weight, counts) for x in given]
    offsets = offsets_of(counts)
    outs = torch.full((90, *wanted[0].shape), float("nan"), dtype=torch.bfloat16, device="cuda")
    for index, out in enumerate(outs):  # each call's kernels start while the one before runs, in the same workspace
        call(*given[index % 3], weight, offsets, out, None)
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted[index % 3]) for index, out in enumerate(outs))


@pytest.mark.parametrize(("low", "high", "exponent"), [(0, 4, 110), (125, 129, 0), (125, 140, 0)])
def test_scales_at_the_ends_are_exact(low, high, exponent, gen, call):
    weight = experts(gen, len(COUNTS), 128, 256, low, high)
    assert isinstance(weight, weights.FragmentWeight) == (high <= 129)
    x = (torch.randn(sum(COUNTS), 256, generator=gen, device="cuda") * 2.0**exponent).bfloat16()
    assert_right(run(call, (x, None), weight, COUNTS, torch.float32), x.float(), weight, COUNTS)


def test_experts_without_rows_and_no_rows_at_all_write_nothing(gen, call):
    weight = experts(gen, 384, 64, 128)
    x = torch.randn(5, 128, generator=gen, device="cuda").bfloat16()
    assert bool(run(call, (x, None), weight, [0] * 384).isnan().all())
    assert run(call, (x[:0], None), weight, [0] * 384).shape == (0, 64)
    counts = [int(expert in (3, 200, 383)) for expert in range(384)]
    assert_right(run(call, (x, None), weight, counts), x.float(), weight, counts)


def test_a_graph_replays_over_changed_counts(gen, call):
    weight, counts = experts(gen, len(COUNTS), 256, 256), [0, 3, 60, 0, 0, 0, 0, 130]
    given = quantise(torch.randn(sum(COUNTS), 256, generator=gen, device="cuda"), "fp8_32")
    offsets, out = offsets_of(COUNTS), torch.empty(sum(COUNTS), 256, device="cuda")
    call(*given, weight, offsets, out, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*given, weight, offsets, out, None)
    for some in (counts, COUNTS):
        offsets.copy_(offsets_of(some))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(out, dequantise(*given, "fp8_32"), weight, some)
