"""Forced layers (cases of the conformance suite): one layer of nano alone, on what the references gave it.

A whole model hides an error behind the errors of other layers; here a layer starts from the references' streams, pre-mix,
compressed rows and selections, so that what differs afterwards is its own. How far it may differ is derived as the cards
derive it (`sum_tolerance`), for a whole layer: an FP32 sum of K terms is off by about eps32 * sqrt(K), K being the longest
sum of a layer, and then rounded to the stream dtype. The references run the layer again on streams moved by that at random
and rounded up or down at random; `FACTOR` times what that moves a token row is what the row may be off. Where a row moved
less than the median row, the median row counts.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepinfer_hal.backend import Backend
from deepinfer_hal.card import sum_tolerance
from deepinfer_hal.conformance.compare import FLIP_SHARE
from deepinfer_hal.conformance.verdict import CheckFailed, Declined

from deepinfer.config import EngineConfig
from deepinfer.errors import BackendUnavailable
from deepinfer.model.numerics import DTYPES
from deepinfer.runner.debug import DebugSession
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner

NUMERICS = {
    "none": {"dtype": "float32", "act_quant": "none", "kv_cache_dtype": "float32"},
    "default": {"dtype": "bfloat16"},
}
"""none: nothing is rounded below float32, so that only the order of sums differs; default: what users run."""

TOKENS = 160
"""More than the window and than the selected rows, few enough to be cheap."""

FACTOR = {"none": 4.0, "default": 1.0}
"""none: what the cards allow over the usual error. default: a rounding that falls otherwise already costs far more than the
error that turned it, so nothing is added."""

OUTSIDE = {"none": FLIP_SHARE, "default": 2 * FLIP_SHARE}
"""Share of token rows that may be off by more, because a router chose otherwise; rounded inputs bring it closer to ties."""

NOISE_RUNS = 4

Found = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Given:
    """What the layer before left: streams [T, m, H], pre_mix [T, m], selected and candidates int32 [T, k]."""

    streams: torch.Tensor
    pre_mix: torch.Tensor
    selected: torch.Tensor
    candidates: torch.Tensor


@dataclass(frozen=True)
class Chain:
    """The references' run: token ids, input of every layer, paged rows, and the draft's target features."""

    ids: np.ndarray
    given: tuple[Given, ...]
    blocks: torch.Tensor
    features: torch.Tensor


def forced_layer(backend: Backend, index: int, folder: Path, layer: int, numerics: str) -> dict[str, Any]:
    """One backbone layer against the references. CheckFailed names the first token row that is too far off."""
    reference, chain = _reference(folder, numerics), _chain(folder, numerics)
    given = chain.given[layer]
    wanted = _run_layer(reference, chain, layer, given.streams)
    noisy = [_run_layer(reference, chain, layer, moved) for moved in _moved(reference, given.streams)]
    got = _run_layer(_runner(backend, index, folder, numerics), chain, layer, given.streams)
    limits = _limits(wanted, noisy, FACTOR[numerics])
    facts, excused = {}, torch.zeros(len(chain.ids), dtype=torch.bool)
    if "select" in wanted:
        excused, facts = _compare_selections(wanted, got["select"], limits["scores"], noisy)
    share, rows = OUTSIDE[numerics], ~excused
    return facts | {name: _compare_rows(name, wanted, got, limits, rows, share) for name in ("streams", "pre_mix")}


def forced_draft(backend: Backend, index: int, folder: Path, numerics: str) -> dict[str, Any]:
    """The draft block on the references' target features: hidden rows and base logits of what it proposes."""
    reference, chain = _reference(folder, numerics), _chain(folder, numerics)
    wanted = _run_draft(reference, chain, chain.features)
    noisy = [_run_draft(reference, chain, moved) for moved in _moved(reference, chain.features)]
    got = _run_draft(_runner(backend, index, folder, numerics), chain, chain.features)
    limits, rows = _limits(wanted, noisy, FACTOR[numerics]), torch.ones(len(wanted["hidden"]), dtype=torch.bool)
    return {name: _compare_rows(name, wanted, got, limits, rows, OUTSIDE[numerics]) for name in ("hidden", "base_logits")}


# ---------------------------------------------------------------------------------------------------- runs


def _load(folder: Path, spec: str, numerics: str, only_reference: bool) -> Runner:
    config = EngineConfig.create(
        model=str(folder), backend=spec, max_model_len=256, max_num_seqs=1, max_num_batched_tokens=256, num_blocks=2,
        **NUMERICS[numerics],
    )  # fmt: skip
    return Runner(load(config, with_draft=True, only_reference=only_reference))


@functools.lru_cache(maxsize=2)
def _runner(backend: Backend, index: int, folder: Path, numerics: str) -> Runner:
    """The backend under test; Declined where it has no such streams or cannot be loaded by its name."""
    dtype = DTYPES[NUMERICS[numerics]["dtype"]]
    if dtype not in backend.capabilities(index).stream_dtypes:
        raise Declined(f"the backend has no {dtype} streams")
    try:
        return _load(folder, f"{backend.name}:{index}", numerics, only_reference=False)
    except BackendUnavailable as error:
        raise Declined(f"the model is loaded by the backend's name: {error}") from error


@functools.cache
def _reference(folder: Path, numerics: str) -> Runner:
    if not (folder / "agreement.json").is_file():
        raise Declined("no checkpoint with agreement.json ships with this package")
    return _load(folder, "cpu", numerics, only_reference=True)


@functools.cache
def _chain(folder: Path, numerics: str) -> Chain:
    """One whole run, which leaves the paged rows and features; then layer by layer, each from the one before."""
    stored = json.loads((folder / "agreement.json").read_text(encoding="utf-8"))
    texts = (prompt + greedy for prompt, greedy in zip(stored["prompts"], stored["greedy"], strict=True))
    ids = np.array(next(text for text in texts if len(text) >= TOKENS)[:TOKENS], np.int32)
    runner = _reference(folder, numerics)
    network, session = runner.network, DebugSession(runner)
    session.run(ids)
    views = network.buffers.rows(TOKENS)
    features, blocks = views.features.clone(), runner.state.blocks.clone()
    network.embed(runner.upload(ids), network.weights.embedding, None, views.streams)
    streams, pre_mix, given = views.streams.clone(), network.blocks.start(views).pre.clone(), []
    for topology in runner.text.layers:
        given.append(Given(streams, pre_mix, views.selected.clone(), views.candidates.clone()))
        found = session.forward_layer(topology.layer, ids, streams, pre_mix, {})
        streams, pre_mix = found["streams"], found["pre_mix"]
    return Chain(ids, tuple(given), blocks, features)


def _run_layer(runner: Runner, chain: Chain, layer: int, streams: torch.Tensor) -> Found:
    """Streams, pre-mix and, of an index source, selection and scores by compressed row. A source finds none of its own rows."""
    topology, given = runner.text.layers[layer], chain.given[layer]
    views, blocks = runner.network.buffers.rows(TOKENS), runner.state.blocks
    views.selected.copy_(torch.full_like(given.selected, -1) if topology.owns_index_query else given.selected)
    views.candidates.copy_(torch.full_like(given.candidates, -1) if topology.builds_pool else given.candidates)
    blocks.copy_(torch.zeros_like(chain.blocks) if topology.owns_kv else chain.blocks)
    attention, scores = runner.network.attention, []
    select_topk = attention.select_topk

    def watched(*args):
        select_topk(*args)
        scores.append(_by_row(*(None if t is None else t.cpu() for t in args[:2]), args[2]))

    attention.select_topk = watched
    try:
        found = DebugSession(runner).forward_layer(layer, chain.ids, streams, given.pre_mix, {})
    finally:
        attention.select_topk = select_topk
    return {name: t.cpu() for name, t in found.items()} | ({"scores": torch.cat(scores)} if scores else {})


def _by_row(scores: torch.Tensor, candidates: torch.Tensor | None, size: int) -> torch.Tensor:
    """float32 [T, rows]: scores where their compressed rows are; -inf where a row is no candidate."""
    if candidates is None:
        return scores.clone()
    most = int(candidates.max()) + 1
    placed = scores.new_full((scores.shape[0], most + 1, size), float("-inf"))
    where = torch.where(candidates < 0, most, candidates).long()[..., None].expand(*candidates.shape, size)
    return placed.scatter_(1, where, scores.view(*candidates.shape, size))[:, :most].flatten(1)


def _run_draft(runner: Runner, chain: Chain, features: torch.Tensor) -> Found:
    session = DebugSession(runner)
    session.store_features(features[:-1])
    result = session.draft(TOKENS - 2, int(chain.ids[-1]))
    return {"hidden": result.raw_hidden[0].cpu(), "base_logits": result.base_logits[0].cpu()}


# ---------------------------------------------------------------------------------------------------- limits


def _moved(runner: Runner, values: torch.Tensor) -> list[torch.Tensor]:
    """`values` off by what the longest sum of a layer usually is, then rounded to their dtype up or down at random."""
    text = runner.text
    keys = text.sliding_window + text.index_topk
    longest = max(
        text.hc_mult * text.hidden_size, text.num_attention_heads * text.head_dim // text.o_groups, text.head_dim + keys,
        text.moe_intermediate_size * text.num_experts_per_tok,
    )  # fmt: skip
    error = sum_tolerance(torch.float32, longest).atol / 4
    found = []
    for seed in range(NOISE_RUNS):
        generator = torch.Generator().manual_seed(seed)
        moved = values.cpu().float() * (1 + error * torch.randn(values.shape, generator=generator))
        if values.dtype == torch.bfloat16:
            cut = torch.randint(0, 1 << 16, values.shape, generator=generator, dtype=torch.int32)
            moved = ((moved.view(torch.int32) + cut) & -(1 << 16)).view(torch.float32)
        found.append(moved.to(values.dtype))
    return found


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [T]: root mean square difference of each row; places that are -inf in both are equal."""
    return (a.float() - b.float()).where(a != b, 0.0).flatten(1).square().mean(1).sqrt()


def _limits(wanted: Found, noisy: list[Found], factor: float) -> Found:
    limits = {}
    for name in wanted.keys() - {"select"}:
        spread = torch.stack([_difference(wanted[name], moved[name]) for moved in noisy]).amax(0)
        limits[name] = factor * spread.clamp(min=float(spread.median()))
    return limits


def _compare_rows(
    name: str, wanted: Found, got: Found, limits: Found, rows: torch.Tensor, share: float
) -> dict[str, float]:  # fmt: skip
    """Every one of `rows` (bool [T]) within its limit, but for a share of them, or one."""
    difference = _difference(wanted[name], got[name]).nan_to_num(float("inf"))
    outside = ((difference > limits[name]) & rows).nonzero().flatten().tolist()
    if len(outside) > max(1, share * len(rows)):
        row = outside[0]
        raise CheckFailed(
            f"{name} of token {row} is off by {float(difference[row]):.3g}, at most {float(limits[name][row]):.3g} is "
            f"allowed; {len(outside)} of {len(rows)} rows are outside"
        )
    used = float((difference / limits[name].clamp(min=1e-30))[rows].median())
    return {"median_share_of_limit": used, "largest": float(difference[rows].max()), "outside": len(outside)}


def _compare_selections(
    wanted: Found, got: torch.Tensor, limit: torch.Tensor, noisy: list[Found]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rows that select otherwise (bool [T]) and how many choices did. A choice may differ only within the limit of the
    score at the edge, and no more often than noise makes the references differ, or 1 %."""
    different, hits = _different_choices(wanted["select"], got)
    scores = wanted["scores"]
    for row in different:
        chosen, others = _chosen(wanted["select"][row]), _chosen(got[row])
        edge = float(scores[row, sorted(chosen)].min()) if chosen else float("-inf")
        for at in sorted(chosen ^ others):
            full = len(chosen) == len(others) and at < scores.shape[1]
            if not full or not abs(float(scores[row, at]) - edge) <= float(limit[row]):
                raise CheckFailed(
                    f"token {row} must {'' if at in chosen else 'not '}select compressed row {at}, which is not within "
                    f"{float(limit[row]):.3g} of the edge {edge:.6g}"
                )
    decisions = max(int((wanted["select"] >= 0).sum()), 1)
    by_noise = max(_different_choices(wanted["select"], moved["select"])[1] for moved in noisy)
    most = max(1, FLIP_SHARE * decisions, by_noise)
    if hits > most:
        raise CheckFailed(f"{hits} of {decisions} selections differ at the edge, at most {int(most)} may")
    excused = torch.zeros(len(got), dtype=torch.bool)
    excused[different] = True
    return excused, {"selections": decisions, "selections_at_the_edge": hits}


def _different_choices(wanted: torch.Tensor, got: torch.Tensor) -> tuple[list[int], int]:
    """Token rows whose sets differ, and how many chosen rows do."""
    extra = [len(_chosen(a) ^ _chosen(b)) for a, b in zip(wanted, got, strict=True)]
    return [row for row, count in enumerate(extra) if count], sum(extra)


def _chosen(row: torch.Tensor) -> set[int]:
    return set(row[row >= 0].tolist())
