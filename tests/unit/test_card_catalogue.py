"""The catalogue of op cards: every op of HAL version 1 is there, and no card leaves out what others are made from."""

from __future__ import annotations

import inspect

import pytest
import torch
from deepinfer_hal.card import Case, OpCard, Tolerance, all_cards, get_card, register, tensor
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import prepare_canonical

GROUPS = {
    "input": "embedding_gather engram_hash engram_lookup engram_gate",
    "attention": "store_window_kv store_compressed_kv store_index_k write_kv load_kv compress_kv score_index select_topk "
    "select_candidate_blocks sparse_attention draft_attention",
    "gemm": "linear grouped_linear grouped_gemm",
    "moe": "route_topk permute unpermute swiglu_quantise moe_layer",
    "residual": "rms_norm rope quantise dequantise hyper_connection_pre hyper_connection_post stream_collapse residual_site",
    "draft": "draft_features store_draft_kv markov_logits confidence_head",
    "sampling": "mask_logits sample top_logprobs verify_drafts nan_row_flags",
    "step and state": "advance_step gather_tokens plan_verify_lengths copy_rows copy_blocks snapshot_state",
    "communication": "all_reduce all_gather broadcast barrier ep_dispatch ep_combine",
}
"""HAL version 1."""

NAMES = sorted(all_cards())


def sample_args(card: OpCard) -> dict:
    """Arguments of the card's last case, whose shapes are not empty."""
    return card.generate(list(card.enumerate_cases())[-1], 0, "cpu", prepare_canonical)


def test_every_op_of_version_1_has_a_card():
    wanted = {name for names in GROUPS.values() for name in names.split()}
    assert wanted <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
class TestEachCard:
    def test_its_reference_takes_exactly_the_signature_in_its_order(self, name):
        card = all_cards()[name]
        parameters = inspect.signature(card.reference).parameters.values()
        positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        assert tuple(positional) == card.arg_names
        extra = [one.name for one in parameters if one.kind is not one.POSITIONAL_OR_KEYWORD]
        assert extra == (["parts"] if card.decomposition else [])

    def test_its_decomposition_names_other_cards_which_its_reference_uses_by_default(self, name):
        card = all_cards()[name]
        assert set(card.decomposition) <= set(NAMES) - {name}
        if card.decomposition:
            parts = vars(inspect.signature(card.reference).parameters["parts"].default)
            assert parts == {op: all_cards()[op].reference for op in card.decomposition}

    def test_it_has_cases_with_unique_ids_that_replay_to_the_same_bytes(self, name):
        card = all_cards()[name]
        cases = list(card.enumerate_cases())
        wanted = 3 if any(arg.is_tensor for arg in card.signature) else 1
        assert len(cases) >= wanted and len({case.id for case in cases}) == len(cases)
        assert all(case.op == name for case in cases)
        once, again = sample_args(card), sample_args(card)
        assert list(once) == list(card.arg_names)
        check_call(card, once)
        for key, value in once.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.contiguous().view(torch.uint8), again[key].contiguous().view(torch.uint8)), key

    def test_it_has_outputs_a_cost_a_tolerance_and_a_workspace(self, name):
        card = all_cards()[name]
        args = sample_args(card)
        tensors = any(arg.is_tensor for arg in card.signature)
        assert bool(card.outputs()) == tensors and set(card.discrete) <= set(card.outputs())
        cost = card.cost(args)
        assert (cost.bytes > 0) == tensors and cost.flops >= 0
        card.reference(**args)
        for output in card.outputs():
            if args[output] is not None:
                allowed = card.tolerance(args, output)
                assert isinstance(allowed, Tolerance) and allowed.rtol >= 0 and allowed.atol >= 0
        assert card.workspace_nbytes(check_call(card, args)) >= 0

    def test_it_says_what_it_does_and_how_it_rounds(self, name):
        card = all_cards()[name]
        assert card.summary.endswith(".") and card.rounding and card.empty and card.invariance
        assert card.reference_invariant in ("yes", "no", "unknown")
        assert inspect.getdoc(inspect.getmodule(card.reference)).startswith(name)


def test_what_is_updated_in_place_is_counted_twice_and_anything_else_once():
    post = get_card("hyper_connection_post")
    args = sample_args(post)
    once = sum(value.nbytes for value in args.values() if value is not None)
    assert post.cost(args).bytes == once + args["streams"].nbytes
    site = get_card("residual_site")
    args = sample_args(site)
    without = {**args, "y": None, "post": None, "comb": None}
    given = sum(args[name].nbytes for name in ("y", "post", "comb"))
    assert site.cost(args).bytes - site.cost(without).bytes == given + args["streams"].nbytes


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'rope' is registered twice"):
        register(OpCard("rope", "test", "Again.", (tensor("x", "f32", "T"),), print))


def test_an_unknown_op_is_answered_with_near_names():
    with pytest.raises(BadCall, match="did you mean select_topk"):
        get_card("select_top_k")


def test_a_case_prints_its_parameters():
    assert Case("linear", {"T": 3, "dtype": "bf16"}).id == "linear(T=3,dtype=bf16)"
