"""The comparison notices when any one feature of the network is broken: a check of the oracle tests themselves.

A feature is broken by another configuration or by edited weights; the network has no switches for this.
"""

import pytest
import torch

from deepinfer.model.reference import Numerics
from tests.oracle.fixtures import open_case, row_difference, share_of_rows_that_agree

UNLIMITED = 10**6
EXACT = Numerics(kv="float32")


def replace_all(weights, ending, make):
    changed = [name for name in weights if name.endswith(ending)]
    assert changed, f"no weight ends with {ending}"
    for name in changed:
        weights[name] = make(weights[name])


BROKEN_CONFIGS = {
    "no YaRN": lambda c: {"rope_scaling": {**c.rope_scaling, "factor": 1}},
    "one rope theta for all layers": lambda c: {"compress_rope_theta": c.rope_theta},
    "window one larger": lambda c: {"sliding_window": c.sliding_window + 1},
    "candidate pool unlimited": lambda c: {"candidate_topk_blocks": UNLIMITED},
    "index top-k unlimited": lambda c: {"index_topk": UNLIMITED},
    "SwiGLU clamp missing": lambda c: {"swiglu_limit": float("inf")},
    "one Sinkhorn iteration": lambda c: {"hc_sinkhorn_iters": 1},
    "routed scaling 1": lambda c: {"routed_scaling_factor": 1.0},
    "one expert fewer per token": lambda c: {"num_experts_per_tok": c.num_experts_per_tok - 1},
    "Engram pads with another token": lambda c: {"engram_pad_token_id": 5},
}

BROKEN_WEIGHTS = {
    "no attention sink": lambda w: replace_all(w, "attn_sink", lambda t: torch.full_like(t, -torch.inf)),
    "router bias ignored": lambda w: replace_all(w, "gate.bias", torch.zeros_like),
    "compressor gate is mean pooling": lambda w: replace_all(w, "compressor.wgate.weight", torch.zeros_like),
    "Engram key and query weights 1": lambda w: (
        replace_all(w, "engram.q_weight", torch.ones_like),
        replace_all(w, "engram.k_weight", torch.ones_like),
    ),
    "Engram tables zero": lambda w: replace_all(w, "engram.embed.weight", torch.zeros_like),
    "mHC scales 1": lambda w: replace_all(w, "_scale", torch.ones_like),
    "norm weights 1": lambda w: replace_all(w, "norm.weight", torch.ones_like),
    "index head weights 1": lambda w: replace_all(w, "weights_proj.weight", torch.ones_like),
}


@torch.no_grad()
def worst_row(case, config_changes, edit_weights):
    net = case.reference(EXACT, **config_changes)
    edit_weights(net.weights)
    return row_difference(net.forward(case.ids)[0], case.expected["noquant.logits"]).max().item()


def test_nothing_broken_agrees():
    assert worst_row(open_case("tiny"), {}, lambda weights: None) <= 1e-4


@pytest.mark.parametrize("feature", BROKEN_CONFIGS)
def test_a_broken_configuration_is_noticed(feature):
    case = open_case("tiny")
    assert worst_row(case, BROKEN_CONFIGS[feature](case.config), lambda weights: None) > 0.1


@pytest.mark.parametrize("feature", BROKEN_WEIGHTS)
def test_broken_weights_are_noticed(feature):
    assert worst_row(open_case("tiny"), {}, BROKEN_WEIGHTS[feature]) > 0.1


@pytest.mark.parametrize("numerics", [EXACT, Numerics(act_quant="fp8_32"), Numerics(dtype=torch.bfloat16)])
@torch.no_grad()
def test_wrong_rounding_fails_the_comparison_with_rounding_on(numerics):
    case = open_case("tiny")
    assert share_of_rows_that_agree(case, case.reference(numerics).forward(case.ids)[0]) < 0.95


BROKEN_DRAFTS = {
    "window one larger": ({"sliding_window": 9}, lambda w: None),
    "another noise token": ({"dspark_noise_token_id": 3}, lambda w: None),
    "backbone experts per token": ({"dspark_num_experts_per_tok": 1}, lambda w: None),
    "no attention sink": ({}, BROKEN_WEIGHTS["no attention sink"]),
    "main norm weight 1": ({}, lambda w: replace_all(w, "main_norm.weight", torch.ones_like)),
}


@pytest.mark.parametrize("feature", BROKEN_DRAFTS)
@torch.no_grad()
def test_a_broken_draft_is_noticed(feature):
    case = open_case("tiny")
    changes, edit_weights = BROKEN_DRAFTS[feature]
    net = case.reference(Numerics(), **changes)
    edit_weights(net.weights)
    position, gold = case.expected["dspark.1.position"], case.expected["dspark.1.gold"]
    base = net.draft(case.expected["dspark.features"][None], case.ids, position[None], gold[None]).base_logits
    assert row_difference(base[0, 0], case.expected["dspark.1.base_logits"]).max() > 0.01
