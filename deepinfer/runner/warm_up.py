"""Steps of padding alone, run before the first request, so that nothing is compiled or allocated for the first time later.

Every row has index -1: kernels start with the shapes of real steps and touch no state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from deepinfer_hal.step import FlatSizes, StepMeta, empty_step, pad_step

from deepinfer.engine.step_plan import SamplingBatch
from deepinfer.runner.sampler import SampledStep

_GROWTH = 4


def prefill_sizes(max_rows: int) -> list[int]:
    """Token rows of the eager steps that are run: powers of four, and the largest."""
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        size *= _GROWTH
    return [*sizes, max_rows]


def padding_step(ratios: tuple[int, ...], rows: int, tokens: int, flat: bool) -> StepMeta:
    """A host plan of one request's `rows` rows, all of them padding; flat: through the flat buffer of window rows."""
    columns = max(1, -(-tokens // 128))
    sizes = FlatSizes(rows, 1, 1) if flat else None
    return pad_step(empty_step(ratios), requests=1, rows=rows, columns=columns, tokens=tokens, flat=sizes)


def run_eager_steps(runner: Any) -> None:
    """Prefill steps of all sizes, and logits with everything that sampling may be asked for."""
    longest_ring = runner.state.layout.longest_ring_step
    for rows in prefill_sizes(runner.max_rows):
        tokens = min(runner.max_model_len, max(rows, 1))
        meta = runner.to_device(padding_step(runner.state.layout.ratios, rows, tokens, rows > longest_ring))
        residual = runner.network.forward(meta)
    for count in sorted({1, min(runner.num_slots, runner.network.outputs.max_rows)}):
        none = np.full(count, -1, np.int32)
        wanted, slots = runner.staging.upload((none, none))
        logits = runner.network.logits(residual, meta.num_rows, wanted)
        for batch in (_settings(count, False), _settings(count, True)):
            step = SampledStep()
            runner.sampler(step, logits, batch, slots, slots, runner.state.history, runner.staging.upload)
            runner.advance(step.tokens, slots, slots, runner.state.history)
    runner.loaded.backend.synchronize(runner.loaded.device_index)


def _settings(rows: int, everything: bool) -> SamplingBatch:
    """Sampling at temperature 1; everything: with penalties, a bias and log-probabilities."""
    ones, zeros, none = np.ones(rows, np.float32), np.zeros(rows, np.float32), np.zeros(rows, np.int32)
    offsets = np.minimum(np.arange(rows + 1, dtype=np.int32), int(everything))
    ids, values = np.zeros(int(everything), np.int32), np.zeros(int(everything), np.float32)
    penalty = ones + 0.1 if everything else ones
    return SamplingBatch(
        ones, none, ones, zeros, np.zeros(rows, np.int64), penalty, zeros, zeros, none, none, offsets, ids, values, everything,
        1 if everything else -1,
    )  # fmt: skip
