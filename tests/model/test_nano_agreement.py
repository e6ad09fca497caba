"""The engine's path on nano against the reference network: every chunking, mixed steps, all numerics."""

import functools
import json

import numpy as np
import pytest
import torch

from deepinfer.model.reference import Sources
from deepinfer.model.reference_ops import ids_to_mask
from deepinfer.runner.debug import DebugSession
from tests.model.batches import Sequence, run_chunks, run_mixed
from tests.model.nano_models import MODELS, nano_folder, nano_reference, nano_runner, nano_text, reference_logits

CHUNKS = [1, 7, 128, 129, None]
NOISE_RUNS, NOISE = 6, 2e-7
KINDS = {"streams", "pre_mix", "select", "candidates", "compressed_kv", "index_keys", "index_scores"}


@functools.cache
def float32_runner(name: str, kv_cache_dtype: str):
    return nano_runner(name, dtype="float32", act_quant="none", kv_cache_dtype=kv_cache_dtype)


@functools.cache
def default_runner(name: str):
    return nano_runner(name)


@functools.cache
def expected(name: str, act_quant: str, kv: str, dtype=torch.float32, seed: int = 0, tokens: int = 300) -> torch.Tensor:
    return reference_logits(nano_reference(name, act_quant, kv, dtype), nano_text(name, tokens, seed))


def largest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[T] largest absolute difference of each row."""
    return (a.float() - b.float()).abs().flatten(1).amax(1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_without_rounding_every_logit_of_300_tokens_agrees_at_any_chunking(name, chunk):
    found = run_chunks(float32_runner(name, "float32"), nano_text(name), chunk)
    assert largest(found, expected(name, "none", "float32")).max() <= 2e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [1, 2])
def test_without_rounding_every_logit_agrees_in_steps_that_mix_prefill_verification_and_decoding(name, seed):
    lengths = [300, 131, 40, 1, 260]
    texts = [nano_text(name, tokens, i) for i, tokens in enumerate(lengths)]
    order = np.random.default_rng(seed).permutation(40)
    sequences = [
        Sequence(ids, slot, tuple(order[slot * 5 : slot * 5 + 5]))
        for ids, slot in zip(texts, [3, 0, 7, 5, 2], strict=True)
    ]
    found = run_mixed(float32_runner(name, "float32"), sequences, seed)
    for i, (rows, tokens) in enumerate(zip(found, lengths, strict=True)):
        assert largest(rows, expected(name, "none", "float32", seed=i, tokens=tokens)).max() <= 2e-3, f"sequence {i}"


@functools.cache
def noise_spread(name: str) -> torch.Tensor:
    """[T] largest change of a row over runs of the reference whose embedding is off by 2e-7: rows on the edge of a
    rounding bin or a choice."""
    net = nano_reference(name, "none", "canonical")
    stored, spread, plain = net.weights, torch.zeros(300), expected(name, "none", "canonical")
    embedding = stored["embed.weight"]
    for run in range(NOISE_RUNS):
        noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(run))
        net.weights = {**stored, "embed.weight": embedding * (1 + NOISE * noise)}
        spread = torch.maximum(spread, largest(reference_logits(net, nano_text(name)), plain))
    net.weights = stored
    return spread


@pytest.mark.parametrize("name", ["calm", "trained"])
@pytest.mark.parametrize("chunk", [7, 129, None])
def test_with_rounded_rows_at_least_95_percent_of_rows_agree_as_far_as_noise_lets_them(name, chunk):
    found = run_chunks(float32_runner(name, "auto"), nano_text(name), chunk)
    difference = largest(found, expected(name, "none", "canonical"))
    assert noise_spread(name).median() <= 1e-2, "noise alone changes so much that the comparison would say nothing"
    assert (difference <= 1e-4 + 4 * noise_spread(name)).float().mean() >= 0.95


@functools.cache
def taps(name: str, act_quant: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The reference's inner tensors, without the batch axis, and the input of layer 0 as that of "layer -1"."""
    net, found = nano_reference(name, act_quant, "canonical", dtype), {}
    ids = torch.from_numpy(nano_text(name).astype(np.int64))[None]
    with torch.no_grad():
        net.forward(ids, found, wanted=KINDS)
        streams = net.expand_streams(net.embed(ids))
        found |= {"streams.-1": streams, "pre_mix.-1": net.first_pre(streams)}
    return {key: value[0] for key, value in found.items()}


def run_layer(name: str, runner, found: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """One layer of the engine on what the reference gave it."""
    text, caches = runner.text, {}

    def nearest(layers):
        return max((one for one in layers if one <= layer), default=None)

    if text.layers[layer].ratio:
        kv, index = nearest(text.kv_source_layer_ids), nearest(text.index_source_layer_ids)
        caches = {"compressed_kv": found[f"compressed_kv.{kv}"], "index_keys": found[f"index_keys.{kv}"]}
        caches["select"] = found[f"select.{index}"]
        if text.candidate_source_layer_id < layer:
            caches["candidates"] = found[f"candidates.{text.candidate_source_layer_id}"].int()
    streams, pre = found[f"streams.{layer - 1}"], found[f"pre_mix.{layer - 1}"]
    return DebugSession(runner).forward_layer(layer, nano_text(name), streams, pre, caches)


def selected(rows: torch.Tensor) -> list[set[int]]:
    return [set(row[row >= 0].tolist()) for row in rows]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layer", range(7))
def test_with_rounded_rows_every_layer_alone_agrees_and_selects_the_same_rows(name, layer):
    """A value on the edge of two codes moves, by a little, every row that reads it: so half of the rows must be exact
    and none far off."""
    reference = taps(name, "none", torch.float32)
    found = run_layer(name, float32_runner(name, "auto"), reference, layer)
    difference = largest(found["streams"], reference[f"streams.{layer}"])
    assert difference.median() <= 1e-4
    assert difference.mean() <= 2e-3
    assert largest(found["pre_mix"], reference[f"pre_mix.{layer}"]).median() <= 1e-5
    if "select" in found:
        same = [a == b for a, b in zip(selected(found["select"]), selected(reference[f"select.{layer}"]), strict=True)]
        assert np.mean(same) >= 0.98


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_exact_score_ties_on_the_edge_of_a_selection_go_to_the_lower_row(layer):
    """Scores of rows that no index head likes are exactly zero, so that at random weights ties at the edge abound."""
    reference = taps("random", "none", torch.float32)
    found = run_layer("random", float32_runner("random", "auto"), reference, layer)["select"]
    tied = rows_tied_on_the_edge(reference, layer, float32_runner("random", "auto").text)
    assert len(tied) >= 5
    assert selected(found[tied]) == selected(reference[f"select.{layer}"][tied])


def rows_tied_on_the_edge(reference: dict[str, torch.Tensor], layer: int, text) -> list[int]:
    """Tokens whose last chosen and first refused row score the same."""
    scores, tied = reference[f"index_scores.{layer}"], []
    for token, row in enumerate(scores):
        row = row[: (token + 1) // text.layers[layer].ratio]
        if layer > text.candidate_source_layer_id:
            row = row[reference[f"candidates.{text.candidate_source_layer_id}"][token, : len(row)]]
        if len(row) > text.index_topk:
            ordered = row.sort(descending=True).values
            tied += [token] if ordered[text.index_topk - 1] == ordered[text.index_topk] else []
    return tied


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layer", range(7))
def test_with_default_numerics_every_layer_alone_is_as_close_to_float32_streams_as_the_reference(name, layer):
    """Roundings of BF16 streams and FP8 inputs fall differently in another order of summation, so the yardstick is what
    they cost the reference itself."""
    rounded = taps(name, "fp8_32", torch.bfloat16)
    exact = reference_layer(nano_reference(name, "fp8_32", "canonical"), name, rounded, layer)
    found = run_layer(name, default_runner(name), rounded, layer)["streams"]
    assert row_error(found, exact) <= 1.2 * row_error(rounded[f"streams.{layer}"], exact)


def reference_layer(net, name: str, found: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    """Streams after one layer of `net` on the inputs of `run_layer`."""
    kv = max((one for one in net.config.kv_source_layer_ids if one <= layer), default=None)
    index = max((one for one in net.config.index_source_layer_ids if one <= layer), default=None)
    sources = Sources()
    if kv is not None:
        rows = found[f"compressed_kv.{kv}"][None].float()
        select = ids_to_mask(found[f"select.{index}"][None], rows.shape[1])
        pool = net.config.candidate_source_layer_id
        candidates = found[f"candidates.{pool}"][None] if pool < layer else None
        sources = Sources(rows, found[f"index_keys.{kv}"][None].float(), select, candidates)
    streams, pre = found[f"streams.{layer - 1}"][None].float(), found[f"pre_mix.{layer - 1}"][None]
    with torch.no_grad():
        ids = torch.from_numpy(nano_text(name).astype(np.int64))[None]
        return net.forward_layer(layer, streams, pre, sources, ids)[0][0]


def row_error(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Median over rows of the root mean square error: a flipped router choice counts as one row."""
    return (found.float() - exact).flatten(1).square().mean(1).sqrt().median()


def test_with_default_numerics_distributions_differ_no_more_than_rounding_moves_the_reference():
    found = run_chunks(default_runner("trained"), nano_text("trained"), 129)
    rounded = expected("trained", "fp8_32", "canonical", torch.bfloat16)
    yardstick = divergence(expected("trained", "fp8_32", "canonical"), rounded)
    assert divergence(found, rounded) <= 1.3 * yardstick <= 0.02
    assert (found.argmax(-1) == rounded.argmax(-1)).float().mean() >= 0.9
    assert (found - rounded).abs().mean() <= 0.2


def divergence(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean KL of b from a, nats."""
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(("act_quant", "mean_kl"), [("none", 1e-3), ("fp8_32", 5e-3)])
def test_engine_and_reference_agree_as_two_backends_must_along_the_stored_greedy_tokens(act_quant, mean_kl):
    """With rounded activations another order of summation flips codes, which costs more than 1e-3 by itself."""
    path = nano_folder("trained") / "agreement.json"
    stored = json.loads(path.read_text("utf-8"))
    dtype = torch.float32 if act_quant == "none" else torch.bfloat16
    engine = float32_runner("trained", "auto") if act_quant == "none" else default_runner("trained")
    net, mine, theirs = nano_reference("trained", act_quant, "canonical", dtype), [], []
    for prompt, greedy in zip(stored["prompts"], stored["greedy"], strict=True):
        ids = np.array(prompt + greedy[:-1], np.int32)
        mine.append(run_chunks(engine, ids, None)[-len(greedy) :])
        theirs.append(reference_logits(net, ids)[-len(greedy) :])
    mine, theirs = torch.cat(mine), torch.cat(theirs)
    best = mine.topk(2).values
    sure = best[:, 0] - best[:, 1] > stored["tau"][act_quant]
    assert len(mine) == 8 * 64
    assert torch.equal(mine.argmax(-1)[sure], theirs.argmax(-1)[sure])
    assert sure.float().mean() >= (0.95 if act_quant == "none" else 0.75)
    assert divergence(mine, theirs) <= mean_kl


@pytest.mark.parametrize("name", MODELS)
def test_drafts_of_several_sequences_agree_without_rounding(name):
    runner, anchors = float32_runner(name, "float32"), [130, 255, 3]
    for slot, anchor in enumerate(anchors):
        for _ in runner.prefill(nano_text(name)[: anchor + 1], 64, slot=slot, first_block=5 * slot):
            pass
    ids = nano_text(name).astype(np.int64)
    arrays = (np.arange(3), np.array(anchors), ids[np.array(anchors) + 1])
    drafts = runner.network.draft(*(runner.upload(array.astype(np.int32)) for array in arrays))
    net, found = nano_reference(name, "none", "float32"), {}
    with torch.no_grad():
        net.forward(torch.from_numpy(ids)[None], found, wanted={"dspark"})
        wanted = net.draft(found["dspark.features"], torch.from_numpy(ids)[None], torch.tensor([anchors]))
        _, tokens, markov = net.markov_chain(wanted.base_logits, wanted.gold)
        confidence = net.confidence_logits(wanted.raw_hidden, markov)
    assert (drafts.base_logits - wanted.base_logits[0]).abs().max() <= 2e-3
    assert torch.equal(drafts.tokens.long(), tokens[0])
    assert (drafts.confidence_logit - confidence[0]).abs().max() <= 2e-3
