"""Nano on ranks of the twin, its experts spread over them: every log-probability is that of one rank, bit for bit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepinfer_ascend import twin
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance.rank_process import Rank
from deepinfer_hal.conformance.rank_threads import run_threads
from deepinfer_hal.expert_parallel import moe_layer_over_ranks
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from deepinfer.config import EngineConfig
from deepinfer.model_path import PACKAGED_MODELS
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner

NANO = PACKAGED_MODELS / "nano"
TOKENS = (9, 0, 4, 1)
PARTS = ("linear", "route_topk", "ep_dispatch", "grouped_gemm", "swiglu_quantise", "ep_combine")

pytestmark = [
    pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason())),
    pytest.mark.skipif(not (NANO / "agreement.json").is_file(), reason="no nano with agreement.json in the package"),
]


def text_of(rank: int) -> np.ndarray:
    return np.array(json.loads((NANO / "agreement.json").read_text("utf-8"))["prompts"][rank][: TOKENS[rank]], np.int32)


def loaded() -> Runner:
    config = dict(model=str(NANO), backend="ascend:twin", max_model_len=128, max_num_seqs=1, max_num_batched_tokens=16)
    return Runner(load(EngineConfig.create(**config, num_blocks=2, fallback="forbid")))


def slice_of(handle: WeightHandle, first: int, last: int) -> WeightHandle:
    whole = handle.canonical()
    scales = None if whole.scales is None else whole.scales[first:last]
    return AscendBackend().prepare_weight(
        TWIN_INDEX, handle.role, CanonicalWeight(whole.format, whole.values[first:last], scales)
    )


def score(rank: Rank, runner: Runner) -> tuple[bytes, int]:
    """This rank's prompt, with its share of the experts for all ranks, and how many layers exchanged rows. A rank without a
    prompt serves its experts."""
    parts = SimpleNamespace(**{op: twin.bind(get_card(op)) for op in PARTS})
    with rank.open() as comm:
        size, me = comm.world_size, comm.rank
        exchanges: list[int] = []
        layers = [block.moe for block in runner.network.weights.blocks]
        experts = layers[0].gate_up.shape[0] // size
        mine = {id(moe.gate): [slice_of(w, me * experts, (me + 1) * experts) for w in (moe.gate_up, moe.down)] for moe in layers}

        def moe(x, codes, scales, gate, bias, gate_up, down, shared_up, shared_down, k, scaling, limit, count, out, counts):
            own = mine[id(gate)]
            exchanges.append(x.shape[0])
            moe_layer_over_ranks(
                comm, parts, max(TOKENS[:size]), x, codes, scales, gate, bias, *own, shared_up, shared_down, k, scaling, limit,
                out, counts,
            )  # fmt: skip

        if TOKENS[me]:
            runner.network.blocks.moe = moe
            return runner.score(text_of(me)).tobytes(), len(exchanges)
        text = runner.network.blocks.text
        for one in layers:
            x = torch.empty(0, text.hidden_size, dtype=torch.bfloat16)
            codes, scales = x.to(torch.uint8), torch.empty(0, text.hidden_size // 32, dtype=torch.uint8)
            moe(x, codes, scales, one.gate, one.bias, one.gate_up, one.down, one.shared_gate_up, one.shared_down,
                text.num_experts_per_tok, text.routed_scaling_factor, text.swiglu_limit, None, x.clone(),
                torch.zeros(one.bias.shape[0], dtype=torch.int32))  # fmt: skip
        return b"", len(exchanges)


@pytest.mark.parametrize("size", [2, 4])
def test_log_probabilities_do_not_depend_on_how_many_ranks_share_the_experts(size):
    runners = [loaded() for _ in range(size)]
    alone = [runners[rank].score(text_of(rank)).tobytes() if TOKENS[rank] else b"" for rank in range(size)]

    answers = run_threads(
        f"{__name__}:score_of", size, AscendBackend(), [TWIN_INDEX] * size, deadline_s=60.0, params={"runners": runners}
    )
    assert all(answer.ok for answer in answers), [str(answer) for answer in answers]
    for rank, answer in enumerate(answers):
        assert answer.value == (alone[rank], len(runners[rank].network.weights.blocks)), f"rank {rank}"


def score_of(rank: Rank, runners: list[Runner]) -> tuple[bytes, int]:
    return score(rank, runners[rank.world.rank])
