"""Sampling of a step's logits through the HAL: flags, log-probabilities, masks, the draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepinfer_hal.dispatch import Dispatcher

from deepinfer.runner.staging import in_host_memory

SAMPLE_PURPOSE = 0
"""Philox purpose of the target model's own draws."""


@dataclass
class SampledStep:
    """Results of a launched step, on the device and then on their way to the host; None where nothing was sampled or asked
    for."""

    tokens: torch.Tensor | None = None
    nan_flags: torch.Tensor | None = None
    logprobs: tuple[torch.Tensor, ...] | None = None
    prompt_logprobs: list[tuple[torch.Tensor, ...]] | None = None
    done: Callable[[], None] | None = None

    def start_download(self, backend: Any, index: int) -> None:
        """Enqueues the copies of all results to the host, and a mark behind them for `wait`."""

        def host(tensor: torch.Tensor) -> torch.Tensor:
            if in_host_memory(tensor.device):
                return tensor
            pinned = backend.pinned_empty(tuple(tensor.shape), tensor.dtype)
            backend.copy_async(pinned, tensor)
            return pinned

        if self.tokens is not None:
            self.tokens, self.nan_flags = host(self.tokens), host(self.nan_flags)
        if self.logprobs is not None:
            self.logprobs = tuple(host(one) for one in self.logprobs)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [tuple(host(one) for one in piece) for piece in self.prompt_logprobs]
        event = backend.event(index)
        if event is None:
            self.done = lambda: backend.synchronize(index)
        else:
            event.record()
            self.done = event.synchronize

    def wait(self) -> None:
        """Returns when the results are on the host."""
        self.done()


class Sampler:
    """Draws one token per row. Log-probabilities are those of the model, before penalties and temperature."""

    def __init__(self, dispatcher: Dispatcher, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._flags = dispatcher.bind("nan_row_flags")
        self._mask = dispatcher.bind("mask_logits")
        self._sample = dispatcher.bind("sample", "target")
        self._top = dispatcher.bind("top_logprobs")

    def __call__(
        self, step: SampledStep, logits: torch.Tensor, batch: Any, slots: torch.Tensor, positions: torch.Tensor,
        history: torch.Tensor, upload: Callable[[Sequence[np.ndarray]], Sequence[torch.Tensor]],
    ) -> None:  # fmt: skip
        """Fills `step`. logits float32 [S, V]; batch: SamplingBatch, numpy arrays of S, which `upload` brings to the device;
        slots, positions int32 [S]."""
        rows = logits.shape[0]
        step.nan_flags = torch.empty(rows, dtype=torch.uint8, device=self.device)
        step.tokens = torch.empty(rows, dtype=torch.int32, device=self.device)
        self._flags(logits, step.nan_flags)
        raw = logits
        if batch.needs_mask:
            if batch.num_logprobs >= 0:
                raw = logits.clone()
            penalties = upload((
                batch.prompt_len, batch.length, batch.repetition, batch.presence, batch.frequency, batch.bias_offsets,
                batch.bias_ids, batch.bias_values,
            ))  # fmt: skip
            self._mask(history, slots, *penalties, None, logits)
        settings = upload((batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds))
        self._sample(logits, *settings, positions, SAMPLE_PURPOSE, step.tokens)
        if batch.num_logprobs >= 0:
            step.logprobs = self.top_logprobs(raw, step.tokens, batch.num_logprobs)

    def top_logprobs(self, logits: torch.Tensor, chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """(chosen_logprob [S], rank [S], ids [S, count], values [S, count]) of the rows' log-softmax."""
        rows = logits.shape[0]
        floats, ints = {"dtype": torch.float32, "device": self.device}, {"dtype": torch.int32, "device": self.device}
        result = (
            torch.empty(rows, **floats), torch.empty(rows, **ints), torch.empty(rows, count, **ints),
            torch.empty(rows, count, **floats),
        )  # fmt: skip
        self._top(logits, chosen, *result)
        return result
