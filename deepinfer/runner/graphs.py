"""Captured steps of a loaded model: one graph per padded size, captured at warm-up and replayed for every step that fits.

All that changes from step to step lies in one device buffer at fixed addresses, filled by one copy before the replay. A graph of
a step with prompts ends before the head: few of its rows have logits, and which is the step's own affair. Where an op of the step
has no kernel that a graph can hold, there are no graphs, and `reason` names the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.errors import BackendError
from deepinfer_hal.step import StepMeta, empty_step, pad_step

from deepinfer.model.graph_plan import GraphShape
from deepinfer.model.layers import Residual
from deepinfer.model.network import Network
from deepinfer.model.state import BLOCK_TOKENS
from deepinfer.runner.staging import Staging, packed_offsets, views_of

DRAFT_ONLY = frozenset({("sample", "draft"), ("draft_attention", ""), ("markov_logits", ""), ("confidence_head", "")})
"""Bound ops that only the draft block calls."""

OUTSIDE = DRAFT_ONLY | {
    ("nan_row_flags", ""), ("mask_logits", ""), ("top_logprobs", ""), ("sample", "target"), ("advance_step", ""),
}  # fmt: skip
"""Bound ops that a captured step does not call: they serve sampling, and the draft block."""


def eager_reason(dispatcher: Dispatcher, outside: frozenset[tuple[str, str]] = OUTSIDE) -> str | None:
    """Why a step cannot be captured: which of its ops have no kernel that a graph can hold, and what serves them."""
    found = {}
    for (bound, role), choice in sorted(dispatcher.choices.items()):
        for op in choice.eager if (bound, role.partition(" #")[0]) not in outside else ():
            found.setdefault(op, f"{op} ({choice.symbol})" if op == choice.op else f"{op} (in {choice.op})")
    return f"no kernel that a graph can hold serves {', '.join(found.values())}" if found else None


class _Captured:
    """A graph with the fixed buffers that its step reads."""

    def __init__(self, shape: GraphShape, packed: torch.Tensor, arrays: list[np.ndarray], meta: StepMeta) -> None:
        self.shape = shape
        views = iter(views_of(packed, arrays))
        self.meta = meta.to(lambda _: next(views))
        self.logit_rows = None if shape.prompts else next(views)
        self.residual: Residual | None = None
        self.graph: Any = None


class StepGraphs:
    """The graphs of one network. `warm_up` captures all `shapes`; `choose` and `launch` serve a step."""

    def __init__(
        self, network: Network, slot: Any, staging: Staging, shapes: tuple[GraphShape, ...], dispatcher: Dispatcher
    ) -> None:
        """slot: the backend's graphs slot. `reason` is known after `warm_up`."""
        self.network, self.slot, self.staging, self.shapes = network, slot, staging, shapes
        self.dispatcher, self.reason = dispatcher, None
        self._captured: dict[GraphShape, _Captured] = {}
        self._smallest_first: list[GraphShape] = []
        self._packed = torch.zeros(0, dtype=torch.uint8, device=staging.device)

    @property
    def count(self) -> int:
        return len(self._captured)

    @property
    def pool_bytes(self) -> int:
        """Device memory of the pool that the graphs share, as the slot counts it."""
        return int(getattr(self.slot, "pool_bytes", 0))

    def graph(self, shape: GraphShape) -> Any:
        """The captured graph of a shape, as the slot made it."""
        return self._captured[shape].graph

    def warm_up(self) -> None:
        """Captures every shape; each is run first, which compiles its kernels. Where steps stay eager, decode steps are only run;
        those with prompts are run at sizes of their own (deepinfer.runner.warm_up)."""
        ratios = self.network.state.layout.ratios
        prepared = []
        for shape in self.shapes:
            arrays, meta = self._arrays(shape, empty_step(ratios), np.zeros(0, np.int32))
            prepared.append((shape, arrays, meta))
        nbytes = max((packed_offsets(arrays)[1] for _, arrays, _ in prepared), default=0)
        self._packed = torch.zeros(nbytes, dtype=torch.uint8, device=self.staging.device)
        for prompts in (False, True):  # what serves a call may be known only when it is made
            if one := next((one for one in prepared if one[0].prompts == prompts), None):
                self._prepare(*one)[1]()
        self.reason = eager_reason(self.dispatcher)
        for shape, arrays, meta in prepared:
            one, step = self._prepare(shape, arrays, meta)
            if self.reason is None:
                one.graph = self._capture(shape, step)
                self._captured[shape] = one
            elif not shape.prompts:
                step()
        self._smallest_first = sorted(self._captured, key=lambda one: (one.prompts, one.rows, one.requests, one.tokens))

    def _prepare(self, shape: GraphShape, arrays: list[np.ndarray], meta: StepMeta) -> tuple[_Captured, Callable[[], None]]:
        """A shape's step of padding alone, with the fixed buffers filled for it."""
        one = _Captured(shape, self._packed, arrays, meta)
        self.staging.fill(self._packed, arrays)
        return one, self._step(one)

    def _capture(self, shape: GraphShape, step: Callable[[], None]) -> Any:
        try:
            return self.slot.capture(step)
        except RuntimeError as error:
            raise BackendError(
                f"a step of {shape.rows} rows of {shape.requests} sequences could not be captured, though every kernel in it "
                f"says that it can be: {error}; enforce_eager runs without graphs"
            ) from error

    def choose(self, meta: StepMeta, logit_rows: int) -> GraphShape | None:
        """The smallest captured shape that holds a host plan, or None: one with prompts, which goes through the flat buffer, only
        where no other does."""
        seen = max((ratio * one.max_visible for ratio, one in meta.ratios.items()), default=0)

        def fits(shape: GraphShape) -> bool:
            if shape.requests < meta.num_requests or shape.rows < meta.num_rows or shape.tokens < seen:
                return False
            return shape.prompts or not (meta.flat or shape.rows < logit_rows)

        return next(filter(fits, self._smallest_first), None)

    def launch(self, shape: GraphShape, meta: StepMeta, logit_rows: np.ndarray) -> torch.Tensor | None:
        """Enqueues a host plan on the graph of `shape`: float32 [S, V], a view that the next step overwrites; None for no
        rows."""
        one = self._captured[shape]
        self.staging.fill(self._packed, self._arrays(shape, meta, logit_rows)[0])
        one.graph.replay()
        if not len(logit_rows):
            return None
        if shape.prompts:
            return self.network.logits(one.residual, shape.rows, self.staging.upload([logit_rows])[0])
        return self.network.outputs.rows(shape.rows).logits[: len(logit_rows)]

    def _arrays(self, shape: GraphShape, meta: StepMeta, logit_rows: np.ndarray) -> tuple[list[np.ndarray], StepMeta]:
        """What changes from step to step, in the order of the fixed buffer, and the padded plan that it comes from."""
        columns = -(-shape.tokens // BLOCK_TOKENS)
        flat = self.network.state.layout.flat_sizes(shape.requests, shape.rows) if shape.prompts else None
        padded = pad_step(meta, requests=shape.requests, rows=shape.rows, columns=columns, tokens=shape.tokens, flat=flat)
        arrays: list[np.ndarray] = []
        padded.to(lambda array: arrays.append(array))
        if shape.prompts:
            return arrays, padded
        wanted = np.full(shape.rows, -1, np.int32)
        wanted[: len(logit_rows)] = logit_rows
        return [*arrays, wanted], padded

    def _step(self, one: _Captured) -> Callable[[], None]:
        network, rows = self.network, one.shape.rows

        def step() -> None:
            network.buffers.rows(rows).ids.fill_(-1)  # a padded row embeds nothing, whatever stood there
            one.residual = network.forward(one.meta)
            if not one.shape.prompts:
                network.logits(one.residual, rows, one.logit_rows)

        return step
