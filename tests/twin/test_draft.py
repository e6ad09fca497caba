"""The draft block and the speculative ops on the twin: nano's drafts are the CPU's, and the verdicts the reference's."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "backends/ascend"))

from deepinfer_ascend import twin  # noqa: E402
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.weights import CanonicalWeight  # noqa: E402

from deepinfer.config import EngineConfig  # noqa: E402
from deepinfer.model_path import PACKAGED_MODELS  # noqa: E402
from deepinfer.runner.debug import DebugSession  # noqa: E402
from deepinfer.runner.runner import Runner  # noqa: E402

NANO = PACKAGED_MODELS / "nano"
TEXT = [17, 305, 411, 9, 88, 1203, 77, 5, 640, 31]

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))


@functools.cache
def draft(backend: str):
    """The block after TEXT, without rounding; what was bound for it, and the fallbacks that were taken."""
    config = EngineConfig.create(
        model=str(NANO), backend=backend, fallback="forbid", dtype="float32", act_quant="none", kv_cache_dtype="float32",
        max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64, num_blocks=4,
    )  # fmt: skip
    runner = Runner.from_config(config, with_draft=True)
    session = DebugSession(runner)
    session.run(np.array(TEXT, np.int32))
    return session.draft(len(TEXT) - 1, 42), runner.loaded.dispatcher


def test_drafts_of_nano_are_those_of_the_cpu_with_references_forbidden():
    (found, dispatcher), (expected, _) = draft("ascend:twin"), draft("cpu")
    assert not dispatcher.fallbacks
    bound = {choice.op for choice in dispatcher.table() if choice.provider == "ascendc"}
    assert {"draft_attention", "markov_logits", "confidence_head"} <= bound
    assert (found.base_logits - expected.base_logits).abs().max() <= 1e-3
    assert (found.draft_logits - expected.draft_logits).abs().max() <= 1e-3
    assert (found.confidence_logit - expected.confidence_logit).abs().max() <= 1e-3
    assert torch.equal(found.tokens, expected.tokens)


def speculation(rule: str, requests: int, width: int, vocab: int) -> dict:
    """Drafts that are near the target, so that every length of an accepted prefix comes up."""
    gen = torch.Generator().manual_seed(3)
    logits = torch.randn(requests, width + 1, vocab, generator=gen) * 2
    near = logits[:, :width] + torch.randn(requests, width, vocab, generator=gen) * 0.4
    drafts = near.argmax(-1).int()
    return {
        "target": logits.argmax(-1).int(), "drafts": drafts,
        "draft_counts": torch.arange(requests, dtype=torch.int32) % (width + 1),
        "target_logits": logits, "draft_logits": near, "seeds": torch.arange(requests) * 7919 - 5,
        "positions": torch.arange(requests, dtype=torch.int32), "rule": rule,
    }  # fmt: skip


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("vocab", [70, 2500])
def test_verdicts_are_the_references_for_every_length(rule, vocab):
    args = speculation(rule, 48, 5, vocab)
    if rule == "coupled":
        args |= {"target_logits": None, "draft_logits": None}
    outs = [(torch.full((48,), -7).int(), torch.full((48, 6), -7).int()) for _ in range(2)]
    twin.bind(get_card("verify_drafts"))(**args, accepted=outs[0][0], tokens=outs[0][1])
    get_card("verify_drafts").reference(**args, accepted=outs[1][0], tokens=outs[1][1])
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    assert set(outs[0][0].tolist()) == set(range(6))


def test_equal_distributions_refuse_nothing_and_a_draft_that_the_target_bans_is_refused():
    args = speculation("rejection", 6, 2, 64)
    args["draft_logits"] = args["target_logits"][:, :2].clone()
    args["draft_counts"][:] = 2
    args["target_logits"][3, 1, int(args["drafts"][3, 1])] = float("-inf")
    accepted, tokens = torch.zeros(6).int(), torch.zeros(6, 3).int()
    twin.bind(get_card("verify_drafts"))(**args, accepted=accepted, tokens=tokens)
    assert accepted.tolist() == [2, 2, 2, 1, 2, 2]
    assert int(tokens[3, 1]) not in (-1, int(args["drafts"][3, 1])) and int(tokens[3, 2]) == -1


def test_markov_rows_that_do_not_fit_into_the_workspace_at_once_have_the_bits_of_rows_alone():
    rows, vocab, gen = 72, 120_000, torch.Generator().manual_seed(1)
    backend = AscendBackend()
    embed, head = (
        backend.prepare_weight(TWIN_INDEX, role, CanonicalWeight("bf16", torch.randn(vocab, 16, generator=gen).bfloat16()))
        for role in ("markov_embed", "markov_head")
    )
    base = torch.randn(1, vocab, generator=gen).expand(rows, vocab).contiguous()
    prev = torch.arange(rows, dtype=torch.int32) * 1600
    out, mu = torch.full((rows, vocab), float("nan")), torch.empty(rows, 16, dtype=torch.bfloat16)
    twin.bind(get_card("markov_logits"))(base, prev, embed, head, out, mu)
    for row in (0, 69, 71):
        alone = torch.empty(1, vocab)
        twin.bind(get_card("markov_logits"))(base[:1], prev[row : row + 1], embed, head, alone, mu[:1].clone())
        assert torch.equal(alone[0], out[row])
