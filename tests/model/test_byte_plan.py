"""The byte plan against the bytes that a loaded engine really holds."""

from pathlib import Path

import pytest

from deepinfer.checkpoint.plan import plan_bytes
from deepinfer.config import EngineConfig
from deepinfer.model.load import tracked_weight_bytes
from deepinfer.runner.load import load

TINY = Path(__file__).parents[1] / "oracle" / "tiny"


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_plan_is_within_a_tenth_of_every_tracked_pool(dtype, with_draft):
    config = EngineConfig.create(
        model=TINY, backend="cpu", dtype=dtype, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=256
    )
    loaded = load(config, with_draft=with_draft)
    plan = plan_bytes(
        loaded.checkpoint.config,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        num_blocks=loaded.sizes.num_blocks,
        numerics=loaded.numerics,
        with_draft=with_draft,
        prepared_nbytes=loaded.backend.prepared_nbytes,
    )
    state = loaded.state.tracked_bytes()
    tracked = {
        "weight_bytes": tracked_weight_bytes(loaded.weights),
        "kv_bytes": state["kv_blocks"],
        "state_bytes": state["window_state"] + state["carry_state"],
        "history_bytes": state["token_history"],
        "workspace_bytes": loaded.network.workspace_bytes["workspace"],
        "logits_bytes": loaded.network.workspace_bytes["logits"],
    }
    for pool, nbytes in tracked.items():
        assert getattr(plan, pool) == pytest.approx(nbytes, rel=0.1), pool
