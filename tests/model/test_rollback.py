"""State rolls back by position alone: going forward and back leaves the same bits as never having gone."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.runner.runner import Runner

TINY = Path(__file__).parents[1] / "oracle" / "tiny"


@functools.cache
def runner() -> Runner:
    config = EngineConfig.create(
        model=str(TINY), backend="cpu", dtype="float32", act_quant="none", max_model_len=256, max_num_seqs=2,
        max_num_batched_tokens=256,
    )  # fmt: skip
    return Runner.from_config(config, with_draft=True)


def forward(ids, start):
    """Runs `ids` at `start` as one step and returns the logits of its last rows."""
    engine = runner()
    ((_, meta, residual),) = engine.prefill(np.asarray(ids, np.int32), start=start)
    rows = engine.upload(np.arange(max(0, meta.num_rows - 8), meta.num_rows, dtype=np.int32))
    return engine.network.logits(residual, meta.num_rows, rows).clone()




@pytest.mark.parametrize("position", [5, 6, 37, 38, 127, 128])
@pytest.mark.parametrize("ahead", range(7))
def test_rollback_gives_the_bits_of_never_having_gone_forward(position, ahead):
    text = torch.randint(3, 200, (160,), generator=torch.Generator().manual_seed(5)).numpy()
    wrong = torch.randint(3, 200, (6,), generator=torch.Generator().manual_seed(6)).numpy()
    forward(text[:position], 0)
    expected = [forward(text[position : position + 3], position), forward(text[position + 3 : position + 7], position + 3)]
    forward(text[:position], 0)
    if ahead:
        forward(wrong[:ahead], position)
    found = [forward(text[position : position + 3], position), forward(text[position + 3 : position + 7], position + 3)]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_wrong_tokens_do_change_the_bits_when_they_are_kept():
    text = torch.randint(3, 200, (40,), generator=torch.Generator().manual_seed(5)).numpy()
    forward(text[:20], 0)
    expected = forward(text[23:26], 23)
    forward(text[:20], 0)
    forward(text[20:23], 20)
    assert not torch.equal(expected, forward(text[23:26], 23))
