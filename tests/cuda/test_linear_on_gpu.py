"""Dense projections on a Hopper GPU: against float64, the same bits whatever rows come along, one rounding of one sum, spare rows
untouched, addresses that the copy engine cannot read."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda import native, native_library, packing
from deepinfer_cuda.backend import CudaBackend
from deepinfer_cuda.workspaces import Workspaces
from deepinfer_hal.c_abi import CLibrary
from deepinfer_hal.card import get_card, sum_tolerance
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.errors import BadCall
from deepinfer_hal.formats import dequantise, quantise, quantise_weight_fp8
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not native_library.LIBRARY.is_file(),
    reason="needs a GPU of compute capability 9.0 and the built kernel library",
)

SHAPES = [
    pytest.param(0, 1280, 5120, True, id="eight slices"),
    pytest.param(0, 5120, 8192, True, id="three slices"),
    pytest.param(0, 5152, 1024, True, id="three slices of tiles that are no pairs"),
    pytest.param(0, 32768, 1280, True, id="one slice"),
    pytest.param(8, 1024, 4096, True, id="groups"),
    pytest.param(0, 17024, 5120, True, id="more steps than a block keeps scales for"),
    pytest.param(8, 2176, 256, True, id="groups of one slice"),
    pytest.param(0, 259, 96, True, id="neither N nor K fills a tile"),
    pytest.param(0, 384, 5120, False, id="bf16, few columns"),
    pytest.param(0, 6, 5120, False, id="bf16, six columns"),
    pytest.param(0, 37, 1000, False, id="bf16, an odd number of columns"),
    pytest.param(4, 24, 512, False, id="bf16, groups"),
    pytest.param(0, 2048, 5120, False, id="bf16, slices apart"),
    pytest.param(0, 16384, 5120, False, id="bf16, slices in turn"),
    pytest.param(4, 16, 72, False, id="bf16, groups that end within a step"),
]
ROWS = (2080, 700, 256, 190, 128, 100, 90, 64, 33, 20, 8, 1)
"""Calls of different tiles; the first has all rows."""


class Problem:
    """A weight [groups, n, k] (groups 0: [n, k]) and rows for it, fp8_32 codes or BF16."""

    def __init__(self, groups: int, n: int, k: int, coded: bool, seed: int = 3, most: int = max(ROWS)) -> None:
        gen = torch.Generator("cuda").manual_seed(seed)
        matrices, lead = max(groups, 1), (groups,) if groups else ()
        drawn = torch.randn(matrices, n, k, generator=gen, device="cuda") * k**-0.5
        rows = torch.randn(most, matrices * k, generator=gen, device="cuda")
        if coded:
            made = [quantise_weight_fp8(one) for one in drawn]
            values, scales = (torch.stack([pair[i] for pair in made]) for i in (0, 1))
            kept = CanonicalWeight("fp8_block32", values.view(*lead, n, k), scales.view(*lead, *scales.shape[1:]))
            self.x, self.x_scale = quantise(rows, "fp8_32")
            self.values = dequantise(self.x, self.x_scale, "fp8_32")
        else:
            kept = CanonicalWeight("bf16", drawn.bfloat16().view(*lead, n, k))
            self.x, self.x_scale = rows.bfloat16(), None
            self.values = self.x.float()
        self.weight, self.columns = WeightHandle("w", kept), matrices * n
        self.call = native.library(torch.device("cuda", 0)).bind(get_card("grouped_linear" if groups else "linear"))

    def run(self, rows: torch.Tensor, dtype=torch.float32, count: int | None = None, extra: int = 0) -> torch.Tensor:
        """The results of these rows; x and out have `extra` columns more from row to row."""
        x = torch.nn.functional.pad(self.x[rows], (0, extra))[:, : self.x.shape[1]]
        scale = None if self.x_scale is None else self.x_scale[rows]
        out = torch.full((len(rows), self.columns + extra), float("nan"), dtype=dtype, device="cuda")[:, : self.columns]
        given = None if count is None else torch.tensor([count], dtype=torch.int32, device="cuda")
        self.call(x, scale, self.weight, given, out, None)
        torch.cuda.synchronize()
        return out


def everyone() -> torch.Tensor:
    return torch.arange(max(ROWS), device="cuda")


@pytest.mark.parametrize(("groups", "n", "k", "coded"), SHAPES)
def test_products_are_right_and_a_row_has_the_same_bits_in_every_call(groups, n, k, coded):
    problem = Problem(groups, n, k, coded)
    whole = problem.run(everyone())
    matrix = problem.weight.dequantise().double().view(-1, n, k)
    wanted = torch.einsum("tgk,gnk->tgn", problem.values.double().view(len(whole), -1, k), matrix).flatten(1)
    allowed = sum_tolerance(torch.float32, k, float(problem.values.abs().max() * matrix.abs().max()))
    assert bool(((whole.double() - wanted).abs() <= allowed.atol + allowed.rtol * wanted.abs()).all())
    for count in ROWS[1:]:
        rows = torch.randperm(max(ROWS), generator=torch.Generator().manual_seed(count))[:count].cuda()
        assert torch.equal(problem.run(rows), whole[rows]), f"{count} rows"
        assert torch.equal(problem.run(rows, torch.bfloat16), whole[rows].bfloat16()), f"{count} rows in bf16"


@pytest.mark.parametrize(
    ("groups", "n", "k", "rows"),
    [
        pytest.param(0, 1280, 512, 2048, id="slices in turn"),
        pytest.param(0, 1280, 128, 2048, id="one slice"),
        pytest.param(2, 256, 128, 4288, id="groups"),
        pytest.param(0, 300, 128, 2048, id="N fills no tile"),
        pytest.param(8, 1024, 4096, 4096, id="in parts"),
        pytest.param(8, 1024, 4096, 1024, id="in two parts"),
        pytest.param(0, 7936, 512, 2360, id="in parts of which the last has few rows"),
    ],
)
def test_thousands_of_rows_give_the_bits_of_few_rows(groups, n, k, rows):
    problem = Problem(groups, n, k, True, most=rows)
    everyone = torch.arange(rows, device="cuda")
    pieces = torch.cat([problem.run(some) for some in everyone.split(200)])
    assert torch.equal(problem.run(everyone), pieces)
    assert torch.equal(problem.run(everyone, torch.bfloat16), pieces.bfloat16())
    assert torch.equal(problem.run(everyone, extra=7), pieces), "addresses that the copy engine cannot read"
    for count in (rows - 100, rows // 3):
        counted = problem.run(everyone, count=count)
        assert torch.equal(counted[:count], pieces[:count]) and bool(counted[count:].isnan().all()), f"{count} rows count"
    if n % 32 == 0:
        codes = torch.empty(rows, problem.columns, dtype=torch.uint8, device="cuda")
        scales = torch.empty(rows, problem.columns // 32, dtype=torch.uint8, device="cuda")
        problem.call(problem.x, problem.x_scale, problem.weight, None, codes, scales)
        wanted = quantise(pieces, "fp8_32")
        assert torch.equal(codes, wanted[0]) and torch.equal(scales, wanted[1])


@pytest.mark.parametrize(
    ("groups", "n", "k"),
    [
        pytest.param(0, 1280, 5120, id="eight slices"),
        pytest.param(0, 640, 1792, id="seven slices"),
        pytest.param(0, 1280, 1536, id="six slices"),
        pytest.param(0, 2560, 1280, id="five slices"),
        pytest.param(0, 3712, 1280, id="four slices"),
        pytest.param(0, 640, 1888, id="seven slices, a step that K does not fill"),
        pytest.param(0, 4608, 5120, id="three slices"),
        pytest.param(0, 5120, 768, id="three slices, of which two are a cluster"),
        pytest.param(0, 5120, 2304, id="the same of six steps each"),
        pytest.param(0, 5152, 1024, id="three slices that meet in the workspace"),
        pytest.param(0, 4096, 1280, id="four slices that meet in the workspace"),
        pytest.param(8, 640, 1024, id="three slices of groups that meet in the workspace"),
        pytest.param(8, 1024, 4096, id="two slices of groups"),
        pytest.param(16, 128, 640, id="two slices of groups, of an odd number of steps"),
        pytest.param(0, 256, 640, id="two slices of an odd number of steps"),
        pytest.param(0, 259, 768, id="N fills no tile"),
    ],
)
@pytest.mark.parametrize("rows", [129, 160, 192, 193, 255, 256])
def test_two_passes_of_rows_give_the_bits_of_one(groups, n, k, rows):
    problem, everyone = Problem(groups, n, k, True, most=256), torch.arange(rows, device="cuda")
    wanted = torch.cat([problem.run(some) for some in everyone.split(100)])
    assert torch.equal(problem.run(everyone), wanted)
    assert torch.equal(problem.run(everyone, torch.bfloat16), wanted.bfloat16())
    assert torch.equal(problem.run(everyone, extra=32), wanted), "rows that are apart"
    for count in (0, 100, 128, 150, rows - 1):
        counted, kept = problem.run(everyone, count=count), min(count, rows)
        assert torch.equal(counted[:kept], wanted[:kept]) and bool(counted[kept:].isnan().all()), f"{count} rows count"
    if n % 32 == 0:
        codes = torch.empty(rows, problem.columns, dtype=torch.uint8, device="cuda")
        scales = torch.empty(rows, problem.columns // 32, dtype=torch.uint8, device="cuda")
        problem.call(problem.x[:rows], problem.x_scale[:rows], problem.weight, None, codes, scales)
        assert all(torch.equal(got, one) for got, one in zip((codes, scales), quantise(wanted, "fp8_32"), strict=True))
    problem.x_scale[3, 5] -= 13  # F16 does not hold both scales of row 3
    wanted = torch.cat([problem.run(some) for some in everyone.split(100)])
    assert torch.equal(problem.run(everyone), wanted), "by BF16"


@pytest.mark.parametrize(
    ("groups", "n", "k"),
    [
        (0, 32768, 1280), (0, 16896, 2048), (0, 5120, 8192), (8, 1024, 4096), (0, 1280, 5120), (0, 4608, 5120), (0, 5120, 2304),
        (0, 5152, 1024),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [64, 100, 190, 256])
def test_hundreds_of_calls_over_the_whole_chip_give_equal_bits(groups, n, k, rows):
    """A stage that is given back while a warp still reads it shows in a call of hundreds, and where memory is busy."""
    problem, out = Problem(groups, n, k, True, most=rows), torch.empty(rows, max(groups, 1) * n, device="cuda")
    wanted = problem.run(torch.arange(rows, device="cuda"))
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(600):
        problem.call(problem.x, problem.x_scale, problem.weight, None, out, None)
        differ += (out != wanted).any()
    assert int(differ) == 0


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("count", [0, 5, 64, 99])
@pytest.mark.parametrize("given", [12, 30, 50, 80])
def test_rows_past_the_count_stay_as_they_are(given, count, coded):
    problem, rows = Problem(0, 320, 1024, coded), torch.arange(given, device="cuda")
    out, kept = problem.run(rows, count=count), min(count, given)
    assert torch.equal(out[:kept], problem.run(rows)[:kept]) and bool(out[kept:].isnan().all())


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("extra", [32, 7])
def test_rows_that_are_apart_give_the_same_bits_aligned_or_not(extra, coded):
    problem, rows = Problem(0, 256, 512, coded), torch.arange(40, device="cuda")
    assert torch.equal(problem.run(rows, extra=extra), problem.run(rows))


@pytest.mark.parametrize(("groups", "n", "k"), [(0, 384, 5120), (0, 16384, 5120), (4, 256, 128)])
def test_a_bf16_row_has_the_same_bits_wherever_it_lies_and_whatever_its_pitch(groups, n, k):
    problem = Problem(groups, n, k, False, most=100)
    whole = problem.run(torch.arange(100, device="cuda"))
    apart = torch.nn.functional.pad(problem.x, (1, 6))[:, 1:-6]  # no row begins at a multiple of 16 bytes
    for first, last in ((0, 100), (0, 1), (7, 8), (8, 9), (60, 100)):
        out = torch.empty(last - first, problem.columns, device="cuda")
        problem.call(apart[first:last], None, problem.weight, None, out, None)
        assert torch.equal(out, whole[first:last]), f"rows {first} to {last}"
    one = problem.x[5:6].expand(3, -1)  # rows at one place
    out = torch.empty(3, problem.columns, device="cuda")
    problem.call(one, None, problem.weight, None, out, None)
    assert torch.equal(out, whole[[5, 5, 5]])


def test_rows_that_the_copy_engine_cannot_read_go_in_parts_where_the_workspace_is_small():
    problem, rows = Problem(0, 384, 512, False, most=300), torch.arange(300, device="cuda")
    whole = problem.run(rows)
    small = CLibrary(
        native.LIBRARY, stream=lambda: torch.cuda.current_stream().cuda_stream, pack=packing.tensors_of(torch.device("cuda", 0)),
        pack_weight=packing.weights_of(torch.device("cuda", 0)), workspace=Workspaces(torch.device("cuda", 0), 256 << 10),
    )  # fmt: skip
    problem.call = small.bind(get_card("linear"))
    for count in (None, 0, 130, 299):  # parts of 128 rows
        got, kept = problem.run(rows, extra=7, count=count), 300 if count is None else count
        assert torch.equal(got[:kept], whole[:kept]) and bool(got[kept:].isnan().all()), count


def test_more_rows_than_a_grid_has_in_its_second_dimension_are_all_multiplied():
    many = 65535 + 300
    problem = Problem(0, 8, 5, False, most=many)  # rows of ten bytes
    out = torch.full((many, 8), float("nan"), device="cuda")
    problem.call(problem.x, None, problem.weight, None, out, None)
    wanted = problem.x.double() @ problem.weight.dequantise().double().T
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("groups", [0, 2])
def test_codes_and_scales_of_a_quantised_result_are_those_of_the_float32_sums(groups):
    problem = Problem(groups, 1024, 512, True)
    for count in (3, 30, 60, 200):
        rows = torch.arange(count, device="cuda")
        codes = torch.empty(count, problem.columns, dtype=torch.uint8, device="cuda")
        scales = torch.empty(count, problem.columns // 32, dtype=torch.uint8, device="cuda")
        problem.call(problem.x[rows], problem.x_scale[rows], problem.weight, None, codes, scales)
        wanted = quantise(problem.run(rows), "fp8_32")
        assert torch.equal(codes, wanted[0]) and torch.equal(scales, wanted[1])


def test_a_row_with_an_infinity_is_nan_and_its_neighbours_are_not():
    problem = Problem(0, 128, 256, True)
    x = torch.randn(5, 256, device="cuda")
    x[2, 40] = float("inf")
    problem.x, problem.x_scale = quantise(x, "fp8_32")
    out = problem.run(torch.arange(5, device="cuda"))
    assert bool(out[2].isnan().all()) and not bool(out[[0, 1, 3, 4]].isnan().any())


@pytest.mark.parametrize(("groups", "n", "k"), [(0, 1280, 5120), (0, 5120, 8192), (0, 32768, 1280), (8, 1024, 4096)])
@pytest.mark.parametrize("where", ["rows", "weights"])
def test_scales_too_far_apart_for_half_precision_give_the_bits_of_many_rows_too(groups, n, k, where):
    problem = Problem(groups, n, k, True)
    if where == "rows":
        problem.x_scale[3, 5] -= 13  # one group of one row, 2^-13 of the others
    else:
        canonical = problem.weight.canonical()
        scales = canonical.scales.clone()
        scales.view(-1, k // 32)[2, 7] += 13
        problem.weight = WeightHandle("w", CanonicalWeight("fp8_block32", canonical.values, scales))
    problem.values = dequantise(problem.x, problem.x_scale, "fp8_32")
    whole = problem.run(everyone()[:300])
    matrix = problem.weight.dequantise().double().view(-1, n, k)
    wanted = torch.einsum("tgk,gnk->tgn", problem.values[:300].double().view(300, -1, k), matrix).flatten(1)
    allowed = sum_tolerance(torch.float32, k, float(problem.values.abs().max() * matrix.abs().max()))
    assert bool(((whole.double() - wanted).abs() <= allowed.atol + allowed.rtol * wanted.abs()).all())
    for count in (256, 190, 64, 20, 8):
        assert torch.equal(problem.run(everyone()[:count]), whole[:count]), f"{count} rows"


def exact_and_size(problem: Problem, rows: int, groups: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 sums, and the sums of the magnitudes of their terms."""
    values, matrix = problem.values[:rows].double().view(rows, -1, k), problem.weight.dequantise().double().view(-1, n, k)
    products = [
        torch.einsum("tgk,gnk->tgn", one, two).flatten(1) for one, two in ((values, matrix), (values.abs(), matrix.abs()))
    ]
    return products[0], products[1]


FAR = [
    pytest.param(100, 0, id="rows of 2^100"),
    pytest.param(0, 100, id="weights of 2^100"),
    pytest.param(55, 58, id="both large"),
    pytest.param(60, -60, id="large rows, small weights"),
    pytest.param(-70, 80, id="small rows, large weights"),
    pytest.param(-50, -40, id="both small"),
]
"""Powers of two on the scales of one row and of one block of weight rows."""


@pytest.mark.parametrize(("groups", "n", "k"), [(0, 1280, 5120), (0, 5120, 8192), (0, 8192, 1280), (2, 1024, 4096)])
@pytest.mark.parametrize(("row", "block"), FAR)
def test_any_scale_whose_values_are_floats_gives_right_sums_with_the_same_bits_in_every_call(groups, n, k, row, block):
    problem, count = Problem(groups, n, k, True), 300
    problem.x_scale[3] += row % 256
    canonical = problem.weight.canonical()
    scales = canonical.scales.clone()
    scales.view(-1, k // 32)[2] += block % 256
    problem.weight = WeightHandle("w", CanonicalWeight("fp8_block32", canonical.values, scales))
    problem.values = dequantise(problem.x, problem.x_scale, "fp8_32")
    whole = problem.run(everyone()[:count])
    wanted, size = exact_and_size(problem, count, groups, n, k)
    assert bool(((whole.double() - wanted).abs() <= 1e-5 * size + 2.0**-140).all())
    for rows in (256, 190, 100, 64, 20, 8):
        assert torch.equal(problem.run(everyone()[:rows]), whole[:rows]), f"{rows} rows"


@pytest.mark.parametrize("row_scale", [127, 7, 254])
def test_a_row_of_zeros_has_zeros_beside_a_row_whose_scales_force_bf16(row_scale):
    problem = Problem(0, 1280, 5120, True)
    problem.x[5], problem.x_scale[5] = 0, row_scale
    problem.values[5] = 0
    alone = problem.run(everyone()[5:6])
    assert bool((alone == 0).all())
    half = {rows: problem.run(everyone()[:rows]) for rows in (64, 30, 8)}
    problem.x_scale[3, 5] -= 20  # F16 does not hold both scales of row 3
    for rows, before in half.items():
        after = problem.run(everyone()[:rows])
        others = [i for i in range(rows) if i != 3]
        assert torch.equal(after[others], before[others]) and torch.equal(after[5], alone[0]), f"{rows} rows"
    few = problem.run(everyone()[:64])
    assert all(torch.equal(problem.run(everyone()[:rows])[:64], few) for rows in (190, 256, 300))


def test_a_scale_that_says_nan_gives_nan_in_its_row_or_columns_alone():
    problem = Problem(0, 1280, 5120, True)
    problem.x_scale[3, 5] = 255
    canonical = problem.weight.canonical()
    scales = canonical.scales.clone()
    scales[2, 7] = 255
    problem.weight = WeightHandle("w", CanonicalWeight("fp8_block32", canonical.values, scales))
    for rows in (8, 20, 64, 100, 192, 256, 300):
        nan = problem.run(everyone()[:rows]).isnan()
        assert bool(nan[3].all()) and bool(nan[:, 64:96].all())
        assert not bool(nan[[i for i in range(rows) if i != 3]][:, [*range(64), *range(96, 1280)]].any())


@pytest.mark.parametrize("count", [64, 190, 300])
def test_a_captured_call_gives_the_same_bits_in_every_replay_and_beside_other_calls(count):
    problems = [Problem(0, n, k, True) for n, k in ((5120, 8192), (1280, 5120), (5120, 2304), (5152, 1024))]
    rows = torch.arange(count, device="cuda")
    wanted = [problem.run(rows) for problem in problems]
    outs = [torch.empty_like(one) for one in wanted]
    given = [(problem.x[rows], problem.x_scale[rows]) for problem in problems]

    def all_of_them():
        for problem, (x, scale), out in zip(problems, given, outs, strict=True):
            problem.call(x, scale, problem.weight, None, out, None)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        all_of_them()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(5):
            all_of_them()
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, one) for out, one in zip(outs, wanted, strict=True))


def moved(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that begins `elements` after an address that is a multiple of 256 bytes."""
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device="cuda")
    return room[elements:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("count", [8, 40, 100, 190, 250, 300])
def test_codes_scales_and_results_at_any_address_give_the_same_bits(count):
    problem, rows = Problem(0, 320, 1024, True), torch.arange(count, device="cuda")
    wanted = problem.run(rows)
    x, scale = problem.x[rows], problem.x_scale[rows]
    for by_x, by_scale, by_out in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (5, 3, 2)):
        out = moved(torch.full_like(wanted, float("nan")), by_out)
        problem.call(moved(x, by_x), moved(scale, by_scale), problem.weight, None, out, None)
        torch.cuda.synchronize()
        assert torch.equal(out, wanted), (by_x, by_scale, by_out)


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("count", [8, 40, 100, 300])
def test_one_row_in_memory_may_be_every_row_of_a_call(count, coded):
    problem = Problem(0, 320, 1024, coded)
    x, scale = problem.x[3:4].expand(count, -1), problem.x_scale[3:4].expand(count, -1) if coded else None
    out = torch.empty(count, 320, device="cuda")
    problem.call(x, scale, problem.weight, None, out, None)
    torch.cuda.synchronize()
    torch.testing.assert_close(out, problem.run(everyone()[3:4]).expand(count, -1), rtol=0, atol=0 if coded else 1e-4)


@pytest.mark.parametrize("coded", [True, False])
def test_a_count_below_zero_means_no_rows_and_one_above_all_means_all(coded):
    problem = Problem(0, 320, 1024, coded)
    for given in (20, 50, 100, 190, 300):
        rows = torch.arange(given, device="cuda")
        assert bool(problem.run(rows, count=-3).isnan().all())
        assert torch.equal(problem.run(rows, count=2**30), problem.run(rows))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("rows", [5, 64, 300])
@pytest.mark.parametrize("groups", [0, 2])
def test_products_of_a_weight_row_with_a_nan_code_are_nan_and_no_others(groups, rows, code):
    problem, backend = Problem(groups, 512, 256, True), CudaBackend()
    stored = problem.weight.canonical()
    stored.values.view(-1, 512, 256)[0, 300, 77] = code
    with pytest.warns(UserWarning, match="1 codes that are NaN, the first at"):
        weight = backend.prepare_weight(0, "wo_a", stored)
    out = torch.empty(rows, problem.columns, device="cuda", dtype=torch.bfloat16)
    call = Dispatcher(backend, 0, fallback="forbid").bind("grouped_linear" if groups else "linear", "wo_a", x="u8", out="bf16")
    call(problem.x[:rows], problem.x_scale[:rows], weight, None, out, None)
    assert bool(out[:, 300].isnan().all()) and int(out.isnan().sum()) == rows


def test_a_sum_of_no_terms_is_zero():
    weight = WeightHandle("w", CanonicalWeight("bf16", torch.zeros(64, 0, dtype=torch.bfloat16, device="cuda")))
    out = torch.full((5, 64), float("nan"), device="cuda")
    x = torch.zeros(5, 0, dtype=torch.bfloat16, device="cuda")
    native.library(torch.device("cuda", 0)).bind(get_card("linear"))(x, None, weight, None, out, None)
    assert bool((out == 0).all())


def test_operands_elsewhere_than_on_the_gpu_are_refused():
    problem = Problem(0, 320, 1024, True)
    out = torch.empty(4, 320, device="cuda")
    with pytest.raises(BadCall, match="is on cpu; the kernels of cuda:0"):
        problem.call(problem.x[:4].cpu(), problem.x_scale[:4], problem.weight, None, out, None)
    stored = problem.weight.canonical()
    away = WeightHandle("w", CanonicalWeight("fp8_block32", stored.values.cpu(), stored.scales.cpu()))
    with pytest.raises(BadCall, match="weight 'w' .* is on cpu"):
        problem.call(problem.x[:4], problem.x_scale[:4], away, None, out, None)
