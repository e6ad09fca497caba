"""sparse_attention and score_index on the twin beyond their cards' cases: more heads than a core takes, every row format."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "backends/ascend"), str(ROOT / "tests/conformance")]

from deepinfer_ascend import twin  # noqa: E402
from deepinfer_hal.card import Case, get_card  # noqa: E402
from harness import run_case  # noqa: E402

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))

CARD = get_card("sparse_attention")
FORMATS = dict(dtype="bf16", window="fp8_32", compressed="fp4_16", block_rows=64, storage="ring")


def case(**params) -> Case:
    return Case("sparse_attention", {"heads": 4, "D": 512, "k": 64, **FORMATS, **params})


@pytest.mark.parametrize(
    "params",
    [
        dict(requests="1700+1", heads=128, k=1536),
        dict(requests="150+2,63+1,64+1", heads=5, D=192, window="mxfp4_32", compressed="mxfp4_32"),
        dict(requests="200+2", heads=70, window="f32", compressed="fp8_32"),
        dict(requests="200+2", heads=33, D=64, dtype="f32", window="fp4_16", compressed="f32"),
        dict(requests="130+1", heads=17, D=320, window="fp4_16", compressed="fp8_32", storage="flat"),
    ],
    ids=["128-heads-1664-keys", "mxfp4", "f32-window", "f32-query", "odd-sizes"],
)
def test_agrees_with_the_card(params):
    run_case(CARD, case(**params), twin.bind(CARD))


def run(args: dict, **stream) -> torch.Tensor:
    twin.bind(CARD)(**args, stream=twin.module().Stream(**stream))
    return args["out"].clone()


def test_a_row_keeps_its_bits_whoever_else_is_in_the_call_and_wherever_its_keys_lie():
    args = CARD.generate(case(requests="300+3,40+2", heads=64, k=128), 3, "cpu", None)
    whole = run(args, cores=4, seed=5)
    for t in range(5):
        alone = dict(args, out=torch.zeros_like(args["out"]), row_to_req=torch.full_like(args["row_to_req"], -1))
        alone["row_to_req"][t] = args["row_to_req"][t]
        assert torch.equal(run(alone)[t], whole[t])
    blocks = torch.arange(args["compressed"].shape[0] - 1, -1, -1)
    moved = dict(args, out=torch.zeros_like(args["out"]), compressed=args["compressed"][blocks].clone())
    moved["block_table"] = (args["compressed"].shape[0] - 1 - args["block_table"]).to(torch.int32)
    assert torch.equal(run(moved), whole)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_one_core_takes_lists_of_every_length_in_turn(dtype):
    sizes = dict(heads=16, k=512, D=128, dtype=dtype)
    args = CARD.generate(case(requests="0+1,700+1,63+2,300+1,129+1,5+1,450+2,191+1", **sizes), 3, "cpu", None)
    many, one = run(args, cores=8, seed=2), run(dict(args, out=torch.zeros_like(args["out"])), cores=1, seed=4)
    assert torch.equal(many, one)


def test_a_row_without_keys_gives_zero():
    args = CARD.generate(case(requests="5+2", k=0), 3, "cpu", None)
    args["window_origin"].fill_(6)
    out = run(args)
    assert not out[0].any()
    assert out[1].any()


INDEX = get_card("score_index")


@pytest.mark.parametrize(
    "params",
    [
        dict(requests="2500+1", heads=64, ratio=1),
        dict(requests="300+2", heads=5, d=64, q="dense", format="f32", candidates=40),
        dict(requests="300+2,1+1", heads=33, d=192, q="dense", format="fp8_32", block_rows=128),
    ],
    ids=["64-heads-2501-rows", "f32-rows", "odd-sizes"],
)
def test_index_scores_agree_with_the_card(params):
    sizes = dict(heads=4, d=128, q="mxfp4_32", format="mxfp4_32", block_rows=64, dtype="bf16", ratio=2)
    run_case(INDEX, Case("score_index", sizes | params), twin.bind(INDEX))


def test_a_candidate_list_may_have_gaps_and_any_order():
    sizes = dict(heads=4, d=128, q="mxfp4_32", format="mxfp4_32", block_rows=64, dtype="bf16", ratio=1, candidates=24)
    args = INDEX.generate(Case("score_index", dict(requests="200+2", **sizes)), 1, "cpu", None)
    args["candidates"][0] = args["candidates"][0].flip(0)
    args["candidates"][1, ::3] = -1
    expected = dict(args, scores=args["scores"].clone())
    INDEX.reference(**expected)
    twin.bind(INDEX)(**args)
    assert torch.equal(args["scores"] == -torch.inf, expected["scores"] == -torch.inf)
    seen = expected["scores"] > -torch.inf
    assert torch.allclose(args["scores"][seen], expected["scores"][seen], rtol=1e-5, atol=1e-4)
