"""The reference network against outputs of a public implementation that nobody here wrote."""

import functools

import pytest
import torch
from deepinfer_hal.errors import BadCall

from deepinfer.model import reference_ops
from deepinfer.model.engram_vocab import engram_primes, engram_token_map
from deepinfer.model.reference import Numerics
from tests.oracle.fixtures import CASES, open_case, row_difference, share_of_rows_that_agree

TOLERANCE = 1e-4
EXACT = Numerics(kv="float32")
ROUNDED = Numerics(kv="canonical")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=CASES)
def case(request):
    return open_case(request.param)


@functools.cache
def run(name: str, numerics: Numerics):
    """Logits [T, V] and taps of the whole fixture text."""
    opened, taps = open_case(name), {}
    with torch.no_grad():
        logits = opened.reference(numerics).forward(opened.ids, taps)
    return logits[0], {key: value[0] for key, value in taps.items()}


def layer_inputs(case, layer):
    if layer == 0:
        net = case.reference()
        streams = net.expand_streams(net.embed(case.ids))
        return streams, net.first_pre(streams)
    return case.expected[f"streams.{layer - 1}"][None], case.expected[f"pre_mix.{layer - 1}"][None]


def test_logits_without_rounding_agree_everywhere_once_exact_score_ties_are_broken_alike(case):
    net, taps = case.reference(EXACT), {}
    net.forward(case.ids, taps, wanted=("select", "index_scores"))
    override = {}
    for layer in case.config.index_source_layer_ids:
        theirs = case.expected[f"noquant.select.{layer}"]
        assert_selections_differ_only_by_ties(taps[f"index_scores.{layer}"][0], taps[f"select.{layer}"][0], theirs)
        override[layer] = theirs[None]
    logits = net.forward(case.ids, select_override=override)[0]
    assert row_difference(logits, case.expected["noquant.logits"]).max() <= TOLERANCE


def assert_selections_differ_only_by_ties(scores, ours, theirs):
    rows = scores.shape[-1]
    ours, theirs = (reference_ops.ids_to_mask(ids, rows) for ids in (ours, theirs))
    differing = (ours != theirs).any(-1).nonzero().flatten().tolist()
    assert len(differing) <= 0.01 * len(scores)
    for query in differing:
        disputed = scores[query][ours[query] != theirs[query]]
        assert disputed.max() - disputed.min() <= 1e-6, f"query {query} chose other rows for other scores"


def test_logits_of_the_tiny_fixture_without_rounding_need_no_tie_broken():
    logits, _ = run("tiny", EXACT)
    assert row_difference(logits, open_case("tiny").expected["noquant.logits"]).max() <= TOLERANCE


def test_every_layer_alone_agrees_with_equal_selections(case):
    for layer in range(case.config.num_hidden_layers):
        streams, pre = layer_inputs(case, layer)
        taps = {}
        out, pre_out, _ = case.reference(ROUNDED).forward_layer(
            layer, streams, pre, case.sources_before(layer), case.ids, taps
        )
        if layer in case.config.index_source_layer_ids:
            assert torch.equal(taps[f"select.{layer}"][0], case.expected[f"select.{layer}"]), f"layer {layer}"
        assert_equal_but_for_a_flipped_bin(row_difference(out[0], case.expected[f"streams.{layer}"]), layer)
        assert row_difference(pre_out[0], case.expected[f"pre_mix.{layer}"]).max() <= TOLERANCE, f"layer {layer}"


def assert_equal_but_for_a_flipped_bin(difference, layer):
    """A window value on the edge of two FP8 codes moves its own row a little; nothing else may differ."""
    assert (difference <= TOLERANCE).float().mean() >= 0.995, f"layer {layer}"
    assert difference.max() <= 10 * TOLERANCE, f"layer {layer}"


def test_source_layers_alone_store_the_oracles_rows_bit_for_bit(case):
    for layer in case.config.kv_source_layer_ids:
        taps = {}
        case.reference(ROUNDED).forward_layer(
            layer, *layer_inputs(case, layer), case.sources_before(layer), case.ids, taps
        )
        for name in (f"compressed_kv.{layer}", f"index_keys.{layer}"):
            assert torch.equal(taps[name][0], case.expected[name]), name


def test_candidate_pool_alone_is_the_oracles(case):
    layer = case.config.candidate_source_layer_id
    taps = {}
    case.reference(ROUNDED).forward_layer(layer, *layer_inputs(case, layer), case.sources_before(layer), case.ids, taps)
    assert torch.equal(taps[f"candidates.{layer}"][0], case.expected[f"candidates.{layer}"].bool())


@pytest.mark.parametrize("name", CASES)
def test_logits_with_rounding_agree_on_at_least_95_percent_of_rows(name):
    logits, _ = run(name, ROUNDED)
    assert share_of_rows_that_agree(open_case(name), logits) >= 0.95


@pytest.mark.parametrize("name", CASES)
def test_router_ids_are_equal_and_weights_match(name):
    expected, (_, taps) = open_case(name).expected, run(name, ROUNDED)
    for layer in (1, 5):
        ours, order = taps[f"router.{layer}.ids"].sort(-1)
        theirs, their_order = expected[f"router.{layer}.ids"].sort(-1)
        assert torch.equal(ours, theirs)
        weights = taps[f"router.{layer}.weights"].gather(-1, order)
        close = row_difference(weights, expected[f"router.{layer}.weights"].gather(-1, their_order)) <= TOLERANCE
        assert close.float().mean() >= 0.95


@pytest.mark.parametrize("name", CASES)
def test_engram_rows_are_exact(name):
    opened, (_, taps) = open_case(name), run(name, ROUNDED)
    for layer in opened.config.engram_layer_ids:
        assert torch.equal(taps[f"engram.{layer}.rows"], opened.expected[f"engram.{layer}.rows"])


def test_token_map_and_table_heights_follow_from_tokenizer_and_config(case):
    token_map = engram_token_map(case.folder / "tokenizer.json", case.config.vocab_size)
    assert torch.equal(token_map, case.expected["engram.token_map"])
    for layer, primes in engram_primes(case.config).items():
        assert sum(primes) == case.weights[f"layers.{layer}.engram.embed.weight"].shape[0]


def draft_of(case, number, features, numerics):
    net, expected = case.reference(numerics), case.expected
    position, gold = expected[f"dspark.{number}.position"], expected[f"dspark.{number}.gold"]
    drafted = net.draft(features, case.ids, position[None], gold[None])
    logits, tokens, markov = net.markov_chain(drafted.base_logits, drafted.gold)
    confidence = net.confidence_logits(drafted.raw_hidden, markov)
    return {
        "base_logits": drafted.base_logits[0, 0],
        "raw_hidden": drafted.raw_hidden[0, 0],
        "normed_hidden": drafted.normed_hidden[0, 0],
        "draft_logits": logits[0, 0],
        "confidence_logit_raw": confidence[0, 0, :, None],
    }, tokens[0, 0]


@pytest.mark.parametrize("number", [0, 1])
def test_drafts_agree_from_the_oracles_features(case, number):
    outputs, tokens = draft_of(case, number, case.expected["dspark.features"][None], ROUNDED)
    for name, actual in outputs.items():
        expected = case.expected[f"dspark.{number}.{name}"].view_as(actual)
        assert row_difference(actual, expected).max() <= TOLERANCE, name
    assert torch.equal(tokens, case.expected[f"dspark.{number}.draft_ids"])


@pytest.mark.parametrize("name", CASES)
def test_drafts_without_rounding_agree_from_our_own_features(name):
    opened, (_, taps) = open_case(name), run(name, EXACT)
    outputs, _ = draft_of(opened, 1, taps["dspark.features"][None], EXACT)
    assert row_difference(outputs["base_logits"], opened.expected["noquant.dspark.1.base_logits"]).max() <= TOLERANCE


def test_bfloat16_streams_differ_from_float32_no_more_than_the_oracles_own():
    tiny = open_case("tiny")
    ours = tiny.reference(Numerics(dtype=torch.bfloat16)).forward(tiny.ids)[0]
    yardstick = row_difference(tiny.expected["bf16.logits"], tiny.expected["logits"]).median()
    assert row_difference(ours, tiny.expected["logits"]).median() <= 1.5 * yardstick


def test_rounded_activations_move_the_logits_but_keep_their_meaning():
    tiny = open_case("tiny")
    rounded = tiny.reference(Numerics(act_quant="fp8_32")).forward(tiny.ids)[0]
    difference = row_difference(rounded, tiny.expected["logits"])
    assert 1e-3 < difference.median() < 1.0
    assert (rounded.argmax(-1) == tiny.expected["logits"].argmax(-1)).float().mean() >= 0.6


def test_a_batch_and_small_query_chunks_give_what_single_sequences_give(monkeypatch):
    tiny = open_case("tiny")
    net = tiny.reference(EXACT)
    ids = torch.stack((tiny.ids[0], tiny.ids[0].flip(0)))
    alone = torch.cat([net.forward(one[None]) for one in ids])
    monkeypatch.setattr(reference_ops, "QUERY_CHUNK", 24)
    assert row_difference(net.forward(ids), alone).max() <= TOLERANCE


def test_gradients_reach_every_weight_with_and_without_recomputed_layers():
    tiny = open_case("tiny")
    gradients = []
    for recompute in (False, True):
        net = tiny.reference(Numerics(act_quant="fp8_32"))
        net.checkpoint_layers = recompute
        net.weights = {name: w.clone().requires_grad_() for name, w in net.weights.items()}
        with torch.enable_grad():
            taps = {}
            loss = net.forward(tiny.ids, taps, wanted=("index_scores", "dspark")).logsumexp(-1).sum()
            loss = loss + sum(taps[f"index_scores.{layer}"].mean() for layer in tiny.config.index_source_layer_ids)
            drafted = net.draft(taps["dspark.features"], tiny.ids, torch.arange(0, 150, 7)[None])
            logits, _, markov = net.markov_chain(drafted.base_logits, drafted.gold)
            loss = loss + logits.logsumexp(-1).sum() + net.confidence_logits(drafted.raw_hidden, markov).sum()
        loss.backward()
        gradients.append({name: w.grad for name, w in net.weights.items() if w.grad is not None})
    untouched = {name for name in net.weights if name not in gradients[0]}
    assert all(name.startswith(("vision.", "aligner.", "image_")) or "bias" in name for name in untouched), untouched
    assert all(torch.isfinite(gradient).all() for gradient in gradients[0].values())
    assert all(torch.allclose(gradients[0][n], gradients[1][n], rtol=1e-3, atol=1e-4) for n in gradients[0])


def test_image_ids_are_refused_and_unknown_ids_embed_to_zero():
    tiny = open_case("tiny")
    net = tiny.reference()
    with pytest.raises(BadCall, match="image token"):
        net.forward(torch.tensor([[0, tiny.config.image_token_id]]))
    assert not net.embed(torch.tensor([[-1, tiny.config.vocab_size]])).any()
