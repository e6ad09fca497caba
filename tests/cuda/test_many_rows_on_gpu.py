"""A prompt's rows on a Hopper GPU, for which some small ops have kernels of their own: the card's results, and a row's bits
whatever rows come along."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda import native, native_library
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.ops._common import float64_reference
from deepinfer_hal.weights import prepare_canonical

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not native_library.LIBRARY.is_file(),
    reason="needs a GPU of compute capability 9.0 and the built kernel library",
)

SITES = [
    pytest.param(dict(T=700, H=5120, codes=True), id="the model's width"),
    pytest.param(dict(T=1300, H=288, codes=True, count=1201), id="a narrow last block, spare rows"),
    pytest.param(dict(T=2300, H=64, codes=False, first=True), id="less than a block's width, no result to add"),
    pytest.param(dict(T=120, H=5120, codes=True, alias=True), id="coefficients in place"),
]


def generated(op: str, **parameters) -> dict:
    return get_card(op).generate(Case(op, parameters), 7, "cuda", prepare_canonical)


def run(op: str, args: dict) -> dict:
    """The call's arguments after it, with memory of their own; arguments that are one tensor stay one."""
    copies: dict[int, torch.Tensor] = {}
    own = {k: copies.setdefault(id(v), v.clone()) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    native.library(torch.device("cuda", 0)).bind(get_card(op))(*own.values())
    torch.cuda.synchronize()
    return own


def outputs(op: str, args: dict) -> list[str]:
    return [name for name in get_card(op).outputs() if args[name] is not None]


@pytest.mark.parametrize("parameters", SITES)
def test_rows_of_a_site_have_the_bits_that_they_have_in_a_small_call(parameters):
    args = generated("residual_site", m=4, dtype="bf16", **parameters)
    many, rows = run("residual_site", args), parameters["T"]
    valid = parameters.get("count", rows)
    for first in (0, 37, valid - 16):
        of_rows = {k: v[first : first + 16] if isinstance(v, torch.Tensor) and v.shape[0] == rows else v for k, v in args.items()}
        few = run("residual_site", {**of_rows, "count": None})
        for name in outputs("residual_site", args):
            assert torch.equal(many[name][first : first + 16].view(torch.uint8), few[name].view(torch.uint8)), name
    for name in outputs("residual_site", args):
        assert torch.equal(many[name][valid:].view(torch.uint8), args[name][valid:].view(torch.uint8)), f"spare rows of {name}"


@pytest.mark.parametrize("parameters", SITES)
def test_many_rows_of_a_site_have_the_results_of_the_card(parameters):
    args, card = generated("residual_site", m=4, dtype="bf16", **parameters), get_card("residual_site")
    got, want = run("residual_site", args), {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with float64_reference():
        card.reference(*want.values())
    for name in ("streams", "out", "pre", "post_out", "comb_out"):
        allowed = card.tolerance(args, name)
        torch.testing.assert_close(got[name].double(), want[name].double(), rtol=allowed.rtol, atol=allowed.atol, equal_nan=True)


@pytest.mark.parametrize(
    "parameters", [dict(T=450, E=8, k=6), dict(T=3000, E=384, k=6, count=2999), dict(T=900, E=5, k=3, holes=True)]
)
def test_many_pairs_are_sorted_as_few_are(parameters):
    args = generated("permute", K=160, x="u8", **parameters)
    got, want = run("permute", args), {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    get_card("permute").reference(*want.values())
    for name in outputs("permute", args):
        assert torch.equal(got[name], want[name]), name


def test_rows_whose_candidates_are_all_that_they_see_have_the_scores_of_rows_without_candidates():
    """Every third row lacks a block and is scored by its candidates; a row of no request is left alone."""
    rows, blocks, block = 300, 2048, 8
    shape = dict(heads=32, d=128, q="mxfp4_32", format="mxfp4_32", block_rows=64, dtype="bf16", ratio=1)
    args = generated("score_index", requests=f"900+{rows}", candidates=blocks, **shape)
    args["row_to_req"][41] = -1
    whole = run("score_index", {**args, "candidates": None})["scores"]
    args["candidates"][::3, :-1] = args["candidates"][::3, 1:].clone()
    scores = run("score_index", args)["scores"]
    columns, seen = torch.arange(blocks * block, device="cuda"), args["visible"][:, None]
    moved = torch.where(columns + block < seen, whole.roll(-block, 1), float("-inf"))
    lacking = (torch.arange(rows, device="cuda") % 3 == 0)[:, None]
    want = torch.where(lacking, moved, whole)
    want[41] = args["scores"][41]
    assert torch.equal(scores.view(torch.int32), want.view(torch.int32))
