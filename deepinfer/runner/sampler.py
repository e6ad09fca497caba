"""Sampling of a step's logits through the HAL: flags, log-probabilities, masks, the draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepinfer_hal.dispatch import Dispatcher

SAMPLE_PURPOSE = 0
"""Philox purpose of the target model's own draws."""


@dataclass
class SampledStep:
    """Device results of a launched step; None where nothing was sampled or asked for."""

    tokens: torch.Tensor | None = None
    nan_flags: torch.Tensor | None = None
    logprobs: tuple[torch.Tensor, ...] | None = None
    prompt_logprobs: list[tuple[torch.Tensor, ...]] | None = None


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
        history: torch.Tensor, upload: Callable[[np.ndarray], torch.Tensor],
    ) -> None:  # fmt: skip
        """Fills `step`. logits float32 [S, V]; batch: SamplingBatch, numpy arrays of S; slots, positions int32 [S]."""
        rows = logits.shape[0]
        step.nan_flags = torch.empty(rows, dtype=torch.uint8, device=self.device)
        step.tokens = torch.empty(rows, dtype=torch.int32, device=self.device)
        self._flags(logits, step.nan_flags)
        raw = logits
        if batch.needs_mask:
            if batch.num_logprobs >= 0:
                raw = logits.clone()
            self._mask(
                history, slots, upload(batch.prompt_len), upload(batch.length), upload(batch.repetition), upload(batch.presence),
                upload(batch.frequency), upload(batch.bias_offsets), upload(batch.bias_ids), upload(batch.bias_values), None,
                logits,
            )  # fmt: skip
        self._sample(
            logits, upload(batch.temperature), upload(batch.top_k), upload(batch.top_p), upload(batch.min_p), upload(batch.seeds),
            positions, SAMPLE_PURPOSE, step.tokens,
        )  # fmt: skip
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
