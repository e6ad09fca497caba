"""Attention over stored rows on a Hopper GPU: decoded rows give the bits of the rows they came from, and a row alone its own."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda import native, native_library
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.ops._common import float64_reference
from deepinfer_hal.row_layout import encode_rows
from deepinfer_hal.weights import prepare_canonical

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not native_library.LIBRARY.is_file(),
    reason="needs a GPU of compute capability 9.0 and the built kernel library",
)

CARD = get_card("sparse_attention")
SHAPES = [
    pytest.param(dict(requests="700+40,130+1", heads=64, k=512, storage="ring"), id="a window and 512 rows"),
    pytest.param(dict(requests="1300+33", heads=64, k=1024, storage="flat"), id="a window and 1024 rows"),
    pytest.param(dict(requests="0+140,3+5", heads=4, k=64, storage="flat"), id="short lists"),
    pytest.param(dict(requests="120+9", heads=64, k=0, storage="ring"), id="a window alone"),
    pytest.param(dict(requests="300+300", heads=64, k=97, storage="flat", skip=3), id="more rows than blocks, some left out"),
    pytest.param(dict(requests="64+180", heads=64, k=70, storage="flat"), id="a second row of each block, which two share"),
    pytest.param(dict(requests="40+560", heads=64, k=70, storage="flat"), id="so many rows that what they read is expanded"),
]
BY_ROW = ("q", "rows", "row_to_req", "positions", "out")


def decoded(cache: torch.Tensor, format: str, block_rows: int) -> torch.Tensor:
    """A store of format bf16 with the rows of `cache`."""
    slots = torch.arange(cache.shape[0] * max(block_rows, 1), dtype=torch.int32, device=cache.device)
    rows = torch.empty(len(slots), 512, dtype=torch.bfloat16, device=cache.device)
    get_card("load_kv").reference(cache, slots, format, block_rows, rows)
    return rows.view(torch.uint8).view(cache.shape[0], -1)


def run(args: dict) -> torch.Tensor:
    args["out"].fill_(float("nan"))
    native.library(torch.device("cuda", 0)).bind(CARD)(*args.values())
    torch.cuda.synchronize()
    return args["out"].view(torch.int16)


def rows_of(args: dict, first: int, count: int) -> dict:
    """The same call with `count` query rows alone, from `first` on."""
    return {k: v[first : first + count].contiguous() if k in BY_ROW and v is not None else v for k, v in args.items()}


@pytest.fixture
def paged(request) -> dict:
    stores = dict(D=512, block_rows=64, dtype="bf16", window="fp8_32", compressed="fp4_16")
    return CARD.generate(Case("sparse_attention", {**request.param, **stores}), 5, "cuda", prepare_canonical)


@pytest.fixture
def flat(paged) -> dict:
    stores = {"window": decoded(paged["window"], paged["window_format"], 0), "window_format": "bf16", "compressed_format": "bf16"}
    if paged["compressed"] is not None:
        stores["compressed"] = decoded(paged["compressed"], paged["compressed_format"], paged["block_rows"])
    return {**paged, **stores, "out": torch.empty_like(paged["out"])}


@pytest.mark.parametrize("paged", SHAPES, indirect=True)
def test_decoded_rows_give_the_bits_of_the_rows_they_came_from(paged, flat):
    assert torch.equal(run(flat), run(paged))


@pytest.mark.parametrize("paged", SHAPES, indirect=True)
def test_decoded_rows_are_attended_within_the_cards_tolerance(paged, flat):
    run(flat)
    wanted = {**flat, "out": torch.full(flat["out"].shape, float("nan"), dtype=torch.float64, device="cuda")}
    with float64_reference():
        CARD.reference(*wanted.values())
    allowed, live = CARD.tolerance(flat, "out"), ~wanted["out"].isnan()
    assert torch.equal(live, ~flat["out"].isnan())
    torch.testing.assert_close(flat["out"][live].double(), wanted["out"][live], rtol=allowed.rtol, atol=allowed.atol)


@pytest.mark.parametrize("paged", [SHAPES[4]], indirect=True)
def test_rows_without_keys_between_short_ones_change_nothing(paged):
    draw = torch.Generator(device="cuda").manual_seed(8)
    ends = torch.randint(0, 97, (len(paged["rows"]), 1), device="cuda", generator=draw)
    rows = torch.where(torch.arange(97, device="cuda") < ends, paged["rows"], -1).to(torch.int32)
    positions = torch.randint(-1, 60, (len(rows),), device="cuda", generator=draw).to(torch.int32)
    requests = torch.where(torch.rand(len(rows), device="cuda", generator=draw) < 0.3, -1, paged["row_to_req"]).to(torch.int32)
    together = {**paged, "rows": rows, "positions": positions, "row_to_req": requests}
    wanted = run(together).clone()
    for row in range(0, len(rows), 5):
        alone = {k: v[row : row + 1].contiguous() if k in BY_ROW and v is not None else v for k, v in together.items()}
        assert torch.equal(run(alone)[0], wanted[row])


@pytest.mark.parametrize("paged", SHAPES[:2], indirect=True)
def test_a_row_alone_has_the_bits_that_it_has_among_others(paged, flat):
    together = run(flat).clone()
    for row in (0, 7, len(together) - 1):
        assert torch.equal(run(rows_of(flat, row, 1))[0], together[row])


@pytest.mark.parametrize("paged", SHAPES[2:7:2], indirect=True)
@pytest.mark.parametrize("compressed", ["fp4_16", "fp8_32"])
def test_a_row_has_the_same_bits_in_a_call_of_few_rows_as_in_one_of_many(paged, compressed):
    if compressed == "fp8_32" and paged["compressed"] is not None:
        shape = (paged["compressed"].shape[0] * paged["block_rows"], 512)
        values = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
        rows = torch.cat(encode_rows(values, compressed), dim=1).view(paged["compressed"].shape[0], -1)
        paged = {**paged, "compressed": rows, "compressed_format": compressed}
    together = run(paged).clone()
    assert len(together) > 132  # More rows than multiprocessors; of few rows two blocks share each.
    for first, count in ((0, 1), (30, 20), (len(together) - 64, 64)):
        assert torch.equal(run(rows_of(paged, first, count)), together[first : first + count])
