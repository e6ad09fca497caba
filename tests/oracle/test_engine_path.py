"""The engine's path (caches, HAL ops, chunks) against outputs of a public implementation that nobody here wrote."""

import functools

import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.runner.debug import DebugSession
from deepinfer.runner.runner import Runner
from tests.oracle.fixtures import CASES, open_case, row_difference

TOLERANCE = 1e-4


@functools.cache
def runner(name: str, kv_cache_dtype: str) -> Runner:
    config = EngineConfig.create(
        model=str(open_case(name).folder), backend="cpu", dtype="float32", act_quant="none", kv_cache_dtype=kv_cache_dtype,
        max_model_len=512, max_num_seqs=4, max_num_batched_tokens=512,
    )  # fmt: skip
    return Runner.from_config(config, with_draft=True)


def score(name, kv_cache_dtype, chunk=None):
    ids = open_case(name).expected["input_ids"].numpy()
    return torch.from_numpy(runner(name, kv_cache_dtype).score(ids, chunk))


def log_probabilities(logits):
    return torch.log_softmax(logits.float(), -1)


def selected_sets(rows):
    return [set(row[row >= 0].tolist()) for row in rows]


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 64, None])
def test_scores_of_tiny_without_rounding_agree_everywhere_at_any_chunking(chunk):
    expected = log_probabilities(open_case("tiny").expected["noquant.logits"])
    assert row_difference(score("tiny", "float32", chunk), expected).max() <= TOLERANCE


@pytest.mark.parametrize("chunk", [7, 64, 129, None])
def test_scores_of_geometry_without_rounding_agree_everywhere_once_exact_score_ties_are_broken_alike(chunk):
    """Zero scores tie exactly there, and that implementation does not choose the lower row; the reference's test shows
    that selections differ by ties alone."""
    case = open_case("geometry")
    theirs = {layer: case.expected[f"noquant.select.{layer}"].int() for layer in case.config.index_source_layer_ids}
    expected = log_probabilities(case.expected["noquant.logits"])
    with DebugSession(runner("geometry", "float32")).selections(theirs):
        assert row_difference(score("geometry", "float32", chunk), expected).max() <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [7, 64, None])
def test_scores_with_rounding_agree_on_at_least_95_percent_of_rows(name, chunk):
    case = open_case(name)
    allowed = TOLERANCE + 4 * case.expected["noise_spread"]
    difference = row_difference(score(name, "auto", chunk), log_probabilities(case.expected["logits"]))
    assert (difference <= allowed).float().mean() >= 0.95


@pytest.mark.parametrize("name", CASES)
def test_every_layer_alone_agrees_with_equal_selections(name):
    case, session = open_case(name), DebugSession(runner(name, "auto"))
    config, expected = case.config, case.expected
    for layer in range(config.num_hidden_layers):
        streams, pre = layer_inputs(case, layer)
        found = session.forward_layer(layer, expected["input_ids"].numpy(), streams, pre, source_rows(case, layer))
        if "select" in found:
            assert selected_sets(found["select"]) == selected_sets(expected[f"select.{layer}"]), f"layer {layer}"
        difference = row_difference(found["streams"], expected[f"streams.{layer}"])
        assert_equal_but_for_a_flipped_bin(difference, layer)
        assert row_difference(found["pre_mix"], expected[f"pre_mix.{layer}"]).max() <= TOLERANCE, f"layer {layer}"


def assert_equal_but_for_a_flipped_bin(difference, layer):
    """A window value on the edge of two FP8 codes moves its own row a little; nothing else may differ."""
    assert (difference <= TOLERANCE).float().mean() >= 0.995, f"layer {layer}"
    assert difference.max() <= 10 * TOLERANCE, f"layer {layer}"


def layer_inputs(case, layer):
    if layer:
        return case.expected[f"streams.{layer - 1}"], case.expected[f"pre_mix.{layer - 1}"]
    streams = case.weights["embed.weight"][case.expected["input_ids"]][:, None].repeat(1, case.config.hc_mult, 1)
    pre = torch.zeros(streams.shape[:2])
    pre[:, 0] = 1
    return streams, pre


def source_rows(case, layer):
    """What the oracle left in the caches and selections that `layer` reads."""
    config, expected = case.config, case.expected

    def nearest(layers):
        return max((one for one in layers if one <= layer), default=None)

    kv, index, pool = (
        nearest(config.kv_source_layer_ids), nearest(config.index_source_layer_ids), config.candidate_source_layer_id,
    )  # fmt: skip
    found = {}
    if kv is not None and config.compress_ratios[layer]:
        found = {"compressed_kv": expected[f"compressed_kv.{kv}"], "index_keys": expected[f"index_keys.{kv}"]}
        found["select"] = expected[f"select.{index}"]
        if pool < layer:
            found["candidates"] = expected[f"candidates.{pool}"]
    return found


class Calls:
    """Keeps the arguments of chosen ops while a model runs."""

    def __init__(self, *ops):
        self.ops, self.seen = ops, {op: [] for op in ops}

    def __call__(self, card, args, call):
        call()
        if card.name in self.ops:
            self.seen[card.name].append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()})


@pytest.mark.parametrize("name", CASES)
def test_engram_rows_and_router_choices_are_exact(name):
    case, calls = open_case(name), Calls("engram_hash", "moe_layer")
    engine = observed_runner(name, calls)
    engine.score(case.expected["input_ids"].numpy())
    config, expected = case.config, case.expected
    for layer, call in zip(config.engram_layer_ids, calls.seen["engram_hash"], strict=True):
        assert torch.equal(call["out"], expected[f"engram.{layer}.rows"])
    for layer, call in enumerate(calls.seen["moe_layer"]):
        if f"router.{layer}.ids" in expected:
            assert_router_choices_equal(engine, call, expected, layer)


def observed_runner(name, observer):
    from deepinfer_hal.dispatch import Dispatcher

    original = Dispatcher.__post_init__

    def with_observer(self):
        original(self)
        self.observer = observer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "__post_init__", with_observer)
        config = EngineConfig.create(
            model=str(open_case(name).folder), backend="cpu", dtype="float32", act_quant="none", max_model_len=512,
            max_num_seqs=4, max_num_batched_tokens=512,
        )  # fmt: skip
        return Runner.from_config(config)


def assert_router_choices_equal(engine, call, expected, layer):
    rows, experts, top_k = call["x"].shape[0], call["bias"].shape[0], call["k"]
    logits = torch.empty(rows, experts)
    ids, weights = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
    bind = engine.loaded.dispatcher.bind
    bind("linear", "gate", x="f32", out="f32")(call["x"], None, call["gate"], None, logits, None)
    counts = torch.empty(experts, dtype=torch.int32)
    bind("route_topk")(logits, call["bias"], top_k, call["scaling"], None, None, ids, weights, counts)
    order, wanted = ids.argsort(1), expected[f"router.{layer}.ids"].argsort(1)
    sure = expected[f"router.{layer}.margin"] > 1e-5
    assert torch.equal(ids.gather(1, order)[sure], expected[f"router.{layer}.ids"].gather(1, wanted)[sure])
    difference = row_difference(weights.gather(1, order), expected[f"router.{layer}.weights"].gather(1, wanted))
    assert (difference[sure] <= TOLERANCE + 4 * expected["noise_spread"][sure]).float().mean() >= 0.95
    assert sure.float().mean() >= 0.99


@pytest.mark.parametrize("name", CASES)
def test_draft_after_the_whole_text_agrees_without_rounding(name):
    case = open_case(name)
    session, theirs = DebugSession(runner(name, "float32")), {}
    if name == "geometry":
        theirs = {layer: case.expected[f"noquant.select.{layer}"].int() for layer in case.config.index_source_layer_ids}
    position, gold = anchor(case, 1)
    with session.selections(theirs):
        session.run(case.expected["input_ids"][: position + 1].numpy())
    draft = session.draft(position, gold)
    assert row_difference(draft.base_logits[0], case.expected["noquant.dspark.1.base_logits"]).max() <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", [0, 1])
def test_draft_block_alone_agrees_in_logits_drafts_and_confidence(name, which):
    case, session = open_case(name), DebugSession(runner(name, "auto"))
    position, gold = anchor(case, which)
    session.store_features(case.expected["dspark.features"][: position + 1])
    assert_draft_agrees(session.draft(position, gold), case, which)


@pytest.mark.parametrize("which", [0, 1])
def test_draft_after_the_whole_text_gives_the_same_drafts_with_rounding(which):
    case, session = open_case("tiny"), DebugSession(runner("tiny", "auto"))
    position, gold = anchor(case, which)
    session.run(case.expected["input_ids"][: position + 1].numpy())
    assert_draft_agrees(session.draft(position, gold), case, which)


def anchor(case, which):
    """(last accepted position, token after it) of a draft of the oracle."""
    return int(case.expected[f"dspark.{which}.position"]), int(case.expected[f"dspark.{which}.gold"])


def assert_draft_agrees(draft, case, which):
    prefix = f"dspark.{which}."
    expected = {key.removeprefix(prefix): value for key, value in case.expected.items() if key.startswith(prefix)}
    assert torch.equal(draft.tokens[0].long(), expected["draft_ids"])
    for name in ("base_logits", "draft_logits", "raw_hidden"):
        assert row_difference(getattr(draft, name)[0], expected[name]).max() <= TOLERANCE, name
    assert (draft.confidence_logit[0] - expected["confidence_logit_raw"]).abs().max() <= TOLERANCE
