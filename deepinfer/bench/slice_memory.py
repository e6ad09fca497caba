"""What a slice takes of a device's memory, by arithmetic, and the refusal beforehand where there is less.

Weights, caches and step buffers are counted as they will be allocated; networks are made one after another, so the largest
counts. While weights are made there are no caches and no buffers yet, but copies of the largest weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from deepinfer.bench.extrapolate import DRAFTS
from deepinfer.bench.slice_config import Slice, make_slice
from deepinfer.bench.slice_workload import Workload
from deepinfer.checkpoint.plan import logical_weights, plan_bytes
from deepinfer.checkpoint.tensors import expected_tensors
from deepinfer.checkpoint.workspace import logits_bytes, workspace_bytes
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.model.graph_plan import temporary_bytes
from deepinfer.model.numerics import Numerics
from deepinfer.model.state import BLOCK_TOKENS, plan_state
from deepinfer.runner.staging import in_host_memory
from deepinfer.units import format_bytes

MAX_BACKTRACK = 6
"""Tokens by which a slice's sequences can be set back: as many as an engine's by default."""

LOOP_ROWS = 2048
"""Token rows of the largest step of the engine's own loop."""

SPARE_BYTES, HOST_SPARE_BYTES = 6 << 30, 1 << 30
"""For what is not counted: the copies and products that measure the ceilings (small ones on the host), graphs, workspaces of
kernels, the driver."""

_LOADING_COPIES = 3
"""Of the largest weight while it is made: drawn, stacked, and as the kernels read it."""


@dataclass(frozen=True)
class SliceMemory:
    """Bytes of one slice: `steps` are buffers, logits and temporaries of the largest network, `loading` the copies of the
    largest weight."""

    weights: int
    caches: int
    steps: int
    loading: int
    spare: int

    @property
    def total(self) -> int:
        return self.weights + max(self.loading, self.caches + self.steps) + self.spare

    def __str__(self) -> str:
        parts = {"weights": self.weights, "caches": self.caches, "the largest step": self.steps, "spare": self.spare}
        return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items())


def logit_rows(max_rows: int, sequences: int) -> int:
    """Rows of logits that a network of a slice holds."""
    return min(max_rows, max(8 * sequences, 64))


def decode_rows(text: Any, load: Workload) -> int:
    """Token rows of the network that serves all decode, verify and draft steps; 0 without them."""
    drafted = text.dspark_block_size if text.draft_layers else 1
    most = max(load.requests, default=0) * drafted
    return max(most, max(load.verify, default=0) * (1 + DRAFTS))


def plan_memory(cut: Slice, load: Workload, backend: Any, index: int) -> SliceMemory:
    """What the slice takes under the workload on a backend's device."""
    prepared_nbytes = backend.prepared_nbytes
    text = cut.config.text
    numerics = Numerics(main_format=text.main_kv_format)
    layout = plan_state(text, numerics, MAX_BACKTRACK)
    sequences = max(load.requests, default=1)
    tokens = -(-load.longest // BLOCK_TOKENS) * BLOCK_TOKENS
    pools = plan_bytes(
        cut.config, max_model_len=tokens, max_num_seqs=sequences, max_backtrack=MAX_BACKTRACK, numerics=numerics,
        prepared_nbytes=prepared_nbytes,
    )  # fmt: skip

    def network(rows: int) -> int:
        buffers = workspace_bytes(text, numerics, layout, sequences, rows, tokens + MAX_BACKTRACK, with_draft=True)
        return buffers + logits_bytes(text, numerics, logit_rows(rows, sequences)) + temporary_bytes(text, numerics, rows)

    sizes = [decode_rows(text, load), *load.prefill, max(LOOP_ROWS, *load.loops) if load.loops else 0]
    largest = max(
        prepared_nbytes(one.role, one.shape, one.format)
        for one in logical_weights(expected_tensors(cut.config).values(), text)
        if len(one.shape) == 3
    )
    return SliceMemory(
        weights=pools.weight_bytes, caches=pools.kv_bytes + pools.state_bytes + pools.history_bytes,
        steps=max(network(rows) for rows in sizes if rows), loading=_LOADING_COPIES * largest,
        spare=HOST_SPARE_BYTES if in_host_memory(backend.device(index)) else SPARE_BYTES,
    )  # fmt: skip


def check_memory(cut: Slice, load: Workload, backend: Any, index: int) -> SliceMemory:
    """The plan; CapacityError with what would fit where it needs more than the device has free, if it tells."""
    plan, free = plan_memory(cut, load, backend, index), backend.memory_info(index).free_bytes
    if free and plan.total > free:
        found = list(_smaller(cut, load, lambda smaller, less: plan_memory(smaller, less, backend, index).total <= free))
        advice = f"lower {', or '.join(found)}" if found else "no single one of --layers, --requests, --context, --prefill does"
        raise CapacityError(
            f"EP{cut.ranks} with {len(cut.layers)} layers needs {format_bytes(plan.total)} ({plan}), {backend.name}:{index} has "
            f"{format_bytes(free)} free; {advice}",
            plan.total, free,
        )  # fmt: skip
    return plan


def _smaller(cut: Slice, load: Workload, fits: Callable[[Slice, Workload], bool]) -> Iterator[str]:
    """For each option the largest value, all else equal, that fits."""
    for layers in range(len(cut.layers) - 1, 0, -1):
        try:
            if fits(make_slice(cut.model, layers, cut.ranks), load):
                yield f"--layers to {layers}"
                break
        except ConfigError:
            continue
    largest = {"requests": max(load.requests, default=0), "context": load.context, "prefill": max(load.prefill, default=0)}
    for name, value in largest.items():
        least = 1 + DRAFTS if name == "context" else 1
        while (value := value // 2) >= least:
            if fits(cut, _limited(load, name, value)):
                yield f"--{name} to {value}"
                break


def _limited(load: Workload, name: str, most: int) -> Workload:
    """The workload with no larger value of that option."""
    if name == "context":
        return replace(load, context=most)
    if name == "prefill":
        return replace(load, prefill=tuple(min(one, most) for one in load.prefill))
    requests = tuple(min(one, most) for one in load.requests)
    return replace(load, requests=requests, verify=tuple(one for one in load.verify if one <= most))
