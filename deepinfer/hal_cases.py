"""Whole-model cases of the conformance suite (entry point group `deepinfer.hal_cases`): a backend against the references.

The rule of agreement: teacher-forced along stored greedy tokens, argmax is equal wherever the references' top-2 gap
exceeds tau, enough positions exceed it, and the mean KL divergence is small. tau is stored with the checkpoint; it comes
from the effect of noise of 2e-7 on the embedding. With rounded activations another order of summation flips codes, so tau
and the divergence are larger there, and fewer positions are decided: too few for the rule, so that case brings a waiver,
and a case of its own holds the tokens.

Forced layers, where every layer starts from what the references left, are in `hal_layers.py`.
"""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepinfer_hal.backend import Backend
from deepinfer_hal.conformance.cases import SystemCase
from deepinfer_hal.conformance.verdict import FAIL, CheckFailed, Declined, Waiver

from deepinfer.config import EngineConfig
from deepinfer.errors import BackendUnavailable
from deepinfer.hal_layers import NUMERICS, forced_draft, forced_layer
from deepinfer.model.state import BLOCK_TOKENS
from deepinfer.model_path import PACKAGED_MODELS
from deepinfer.runner.forced import Part, forced_step
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner

MODEL = PACKAGED_MODELS / "nano"
AGREEMENT = "agreement.json"

LEAST_SHARE, MOST_DIVERGENCE = 0.95, 1e-3
"""The rule of agreement: share of positions above tau, mean KL divergence in nats."""

_WRONG_KERNEL = 5e-3
"""Mean KL divergence that no order of sums explains: with rounded inputs the CPU's kernels differ by 1.1e-3."""

_RULE_WITH_ROUNDING = "model(name=nano,rule=agreement,act_quant=fp8_32)"
_KNOWN = Waiver(
    _RULE_WITH_ROUNDING,
    "nano is too restless for the rule where inputs are rounded: tau is 1.0, 84 % of its positions exceed it, and another order "
    "of sums flips codes; rule=tokens holds the choice of tokens",
    datetime.date(2027, 6, 30),
    (FAIL,),
)

LAYERS = range(7)
"""Backbone layers of nano."""

_CORE_LAYERS = (1, 6)
"""One that owns an Engram table, compressed rows and a selection, and one that only reads those of others."""

_CORE_PROMPTS = 3
_CHUNK = 96


def cases(profile: str) -> list[SystemCase]:
    """The packaged checkpoint against the references: over some prompts and layers in core, all of them in full."""
    prompts = _CORE_PROMPTS if profile == "core" else None
    why = "A backend chooses the tokens that the references choose wherever the choice is not within noise"
    measured = ", at enough positions, and its distribution is theirs."
    return [
        SystemCase(
            "model(name=nano,rule=agreement,act_quant=none)", why + measured,
            functools.partial(agreement, folder=MODEL, act_quant="none", prompts=prompts), group="model none",
        ),
        SystemCase(
            "model(name=nano,rule=tokens,act_quant=fp8_32)", why + ".",
            functools.partial(tokens, folder=MODEL, act_quant="fp8_32", prompts=prompts), group="model fp8_32",
        ),
        *_whole_rule_with_rounding(profile, why + measured),
        SystemCase(
            "model(name=nano,rule=chunks)",
            "One prompt gives the same choices whether it is prefilled at once or in chunks.",
            functools.partial(chunks, folder=MODEL), group="model none",
        ),
        *_forced_cases(profile),
    ]


def _whole_rule_with_rounding(profile: str, why: str) -> list[SystemCase]:
    """Over all positions only: a part of them may lie above tau by luck."""
    run = functools.partial(agreement, folder=MODEL, act_quant="fp8_32")
    return [] if profile == "core" else [SystemCase(_RULE_WITH_ROUNDING, why, run, _KNOWN, "model fp8_32")]


def _forced_cases(profile: str) -> list[SystemCase]:
    why = "A layer given what the references gave it differs from theirs by the order of its sums alone."
    found = []
    for numerics in NUMERICS:
        for layer in _CORE_LAYERS if profile == "core" else LAYERS:
            run = functools.partial(forced_layer, folder=MODEL, layer=layer, numerics=numerics)
            found.append(SystemCase(f"model(name=nano,layer={layer},numerics={numerics})", why, run, group=f"layers {numerics}"))
        if profile != "core":
            run = functools.partial(forced_draft, folder=MODEL, numerics=numerics)
            found.append(SystemCase(f"model(name=nano,layer=draft,numerics={numerics})", why, run, group=f"layers {numerics}"))
    return found


def agreement(backend: Backend, index: int, folder: Path, act_quant: str, prompts: int | None = None) -> dict[str, Any]:
    """The rule of agreement; returns what was found. CheckFailed where it is broken, Declined without a stored tau."""
    facts = _same_tokens(backend, index, folder, act_quant, prompts)
    if facts["above_tau"] < LEAST_SHARE:
        message = f"only {facts['above_tau']:.1%} of the positions exceed tau {facts['tau']:.3g}, {LEAST_SHARE:.0%} must"
        raise CheckFailed(f"{message}; the mean KL divergence is {facts['mean_kl']:.3g}", facts)
    return _no_farther(facts, MOST_DIVERGENCE)


def tokens(backend: Backend, index: int, folder: Path, act_quant: str, prompts: int | None = None) -> dict[str, Any]:
    """Equal tokens above tau, and no divergence that only a wrong kernel makes; as `agreement` otherwise."""
    return _no_farther(_same_tokens(backend, index, folder, act_quant, prompts), _WRONG_KERNEL)


def _no_farther(facts: dict[str, Any], most: float) -> dict[str, Any]:
    if not facts["mean_kl"] <= most:
        raise CheckFailed(f"the mean KL divergence is {facts['mean_kl']:.3g}, at most {most} is allowed", facts)
    return facts


def _same_tokens(backend: Backend, index: int, folder: Path, act_quant: str, prompts: int | None) -> dict[str, Any]:
    """Compares logits along the stored texts; CheckFailed where argmax differs above tau."""
    stored = _stored(folder)
    tau, (texts, lengths) = stored["tau"][act_quant], _texts(stored, prompts)
    runner = _runner(backend, index, folder, act_quant)
    theirs = _logits(runner, texts, lengths)
    ours = _reference_logits(folder, _dtype(backend, index), act_quant, prompts)
    best = ours.topk(2).values
    sure = best[:, 0] - best[:, 1] > tau
    wrong = (sure & (ours.argmax(-1) != theirs.argmax(-1))).nonzero().flatten().tolist()
    expected, got = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    divergence = float((expected.exp() * (expected - got)).sum(-1).mean())
    share = float(sure.double().mean())
    facts = {"positions": len(sure), "above_tau": share, "mean_kl": divergence, "tau": tau, "different": len(wrong)}
    facts["fallbacks"] = sorted(runner.loaded.dispatcher.fallbacks)
    if wrong:
        row = wrong[0]
        raise CheckFailed(
            f"position {row}: argmax is {int(theirs[row].argmax())}, must be {int(ours[row].argmax())}; the gap "
            f"{float(best[row, 0] - best[row, 1]):.3g} exceeds tau {tau:.3g}; {len(wrong)} of {len(sure)} positions differ",
            facts,
        )
    return facts


def chunks(backend: Backend, index: int, folder: Path) -> dict[str, Any]:
    """Argmax after every position of one prompt, at once against in chunks, where the gap exceeds tau."""
    stored = _stored(folder)
    text = max(stored["prompts"], key=len)
    runner = _runner(backend, index, folder, "none")
    whole, cut = (torch.from_numpy(runner.score(text, chunk)) for chunk in (None, _CHUNK))
    best = whole.topk(2).values
    wrong = (best[:, 0] - best[:, 1] > stored["tau"]["none"]) & (whole.argmax(-1) != cut.argmax(-1))
    if bool(wrong.any()):
        raise CheckFailed(f"position {int(wrong.nonzero()[0])} chooses another token with chunks of {_CHUNK}")
    fallbacks = sorted(runner.loaded.dispatcher.fallbacks)
    return {"positions": len(text), "bits_equal": bool(torch.equal(whole, cut)), "fallbacks": fallbacks}


def _stored(folder: Path) -> dict[str, Any]:
    path = folder / AGREEMENT
    if not path.is_file():
        raise Declined(f"no checkpoint with {AGREEMENT} ships with this package")
    return json.loads(path.read_text(encoding="utf-8"))


def _dtype(backend: Backend, index: int) -> str:
    """float32 streams where the backend has them, since tau was measured with them."""
    return "float32" if torch.float32 in backend.capabilities(index).stream_dtypes else "auto"


def _config(folder: Path, spec: str, dtype: str, act_quant: str) -> EngineConfig:
    return EngineConfig.create(
        model=str(folder), backend=spec, dtype=dtype, act_quant=act_quant, max_model_len=1024, max_num_seqs=2, num_blocks=8
    )


def _runner(backend: Backend, index: int, folder: Path, act_quant: str) -> Runner:
    """References serve what the backend has no kernel for: a model needs every op. A case's facts name them."""
    try:
        return Runner(load(_config(folder, f"{backend.name}:{index}", _dtype(backend, index), act_quant)))
    except BackendUnavailable as error:
        raise Declined(f"the model is loaded by the backend's name: {error}") from error


@functools.cache
def _reference_runner(folder: Path, dtype: str, act_quant: str) -> Runner:
    """The references on the host: what every backend is held against."""
    return Runner(load(_config(folder, "cpu", dtype, act_quant), only_reference=True))


def _texts(stored: dict[str, Any], prompts: int | None) -> tuple[list[list[int]], list[int]]:
    """The first prompts with their greedy tokens, and how many of each are greedy."""
    texts = [p + g for p, g in zip(stored["prompts"], stored["greedy"], strict=True)][:prompts]
    return texts, [len(greedy) for greedy in stored["greedy"]][:prompts]


@functools.cache
def _reference_logits(folder: Path, dtype: str, act_quant: str, prompts: int | None) -> torch.Tensor:
    """What `_logits` gives of the references on the host."""
    return _logits(_reference_runner(folder, dtype, act_quant), *_texts(_stored(folder), prompts))


def _logits(runner: Runner, texts: list[list[int]], lengths: list[int]) -> torch.Tensor:
    """float32 [sum of lengths, V] on the host: predictions of the last tokens of each text, one text a step."""
    found = []
    for text, length in zip(texts, lengths, strict=True):
        ids = np.array(text[:-1], np.int32)
        blocks = np.arange(-(-len(ids) // BLOCK_TOKENS), dtype=np.int32)
        step = forced_step(runner, [Part(0, blocks, 0, ids)])
        found.append(step.logits(np.arange(len(ids) - length, len(ids))).cpu().clone())
    return torch.cat(found)
