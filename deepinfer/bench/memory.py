"""Bytes as planned, as held, and as the operating system saw them."""

from __future__ import annotations

import resource
import sys
from typing import Any

from deepinfer.checkpoint.plan import plan_bytes
from deepinfer.model.load import tracked_weight_bytes

POOLS = ("weights", "kv", "state", "history", "workspace", "logits")


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def tracked_bytes(loaded: Any) -> dict[str, int]:
    """Bytes that the pools of a loaded model hold."""
    state, workspace = loaded.state.tracked_bytes(), loaded.network.workspace_bytes
    return {
        "weights": tracked_weight_bytes(loaded.weights),
        "kv": state["kv_blocks"],
        "state": state["window_state"] + state["carry_state"],
        "history": state["token_history"],
        "workspace": workspace["workspace"],
        "logits": workspace["logits"],
    }


def planned_bytes(loaded: Any) -> dict[str, int]:
    """Bytes of the same pools by the plan, made from configuration and sizes alone."""
    plan = plan_bytes(
        loaded.checkpoint.config,
        max_model_len=loaded.sizes.max_model_len,
        max_num_seqs=loaded.sizes.num_slots,
        max_num_batched_tokens=loaded.sizes.max_rows,
        num_blocks=loaded.sizes.num_blocks,
        numerics=loaded.numerics,
        prepared_nbytes=loaded.backend.prepared_nbytes,
    )
    return {name: getattr(plan, f"{'weight' if name == 'weights' else name}_bytes") for name in POOLS}


def describe_memory(loaded: Any, rss_before_loading: int) -> dict[str, Any]:
    """Plan and truth by pool, with the growth of the peak resident size since before the model was loaded."""
    return {
        "planned": planned_bytes(loaded),
        "tracked": tracked_bytes(loaded),
        "peak_rss_above_import": peak_rss_bytes() - rss_before_loading,
    }
