"""What the scheduler hands a runner for one step, and what the runner gives back. Host numpy arrays throughout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from deepinfer.engine.request import Sequence


@dataclass(slots=True)
class SamplingBatch:
    """Settings of the S rows sampled in a step, in the form that the mask_logits and sample ops take.

    float32 [S]: temperature, top_p, min_p, repetition, presence, frequency. int32 [S]: top_k (<= 0 off), prompt_len,
    length (tokens before the one to be produced). int64 [S]: seeds. CSR of additive biases: bias_offsets int32 [S + 1],
    bias_ids int32 [n], bias_values float32 [n] (-inf bans). needs_mask: some row has a penalty or a bias.
    num_logprobs: most alternatives that a row wants, -1 if none wants log-probabilities.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    prompt_len: np.ndarray
    length: np.ndarray
    bias_offsets: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    needs_mask: bool
    num_logprobs: int


@dataclass(slots=True)
class PromptSpan:
    """Rows of `logit_rows` that belong to one sequence: the next `count` tokens of its prompt's log-probabilities."""

    sequence: Sequence
    count: int


@dataclass(slots=True)
class StepPlan:
    """One step of R sequences and T = cu_q[-1] token rows.

    cu_q int32 [R + 1]; starts int32 [R], position of the first query token; slots int32 [R]; block_tables int32
    [R, Bmax], -1 padded; new_tokens: (slot, start, int32 ids) to write to the token history before the step;
    sample_requests int32 [S]: requests whose last row is sampled, `sampled` those sequences; positions_out int32 [S]:
    absolute position of the token to be produced. logit_rows int32 [P]: token rows whose log-probability of
    logit_targets int32 [P] is wanted, with num_prompt_logprobs alternatives each.
    """

    sequences: list[Sequence]
    cu_q: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    block_tables: np.ndarray
    new_tokens: list[tuple[int, int, np.ndarray]]
    sample_requests: np.ndarray
    positions_out: np.ndarray
    sampling: SamplingBatch
    sampled: list[Sequence]
    logit_rows: np.ndarray
    logit_targets: np.ndarray
    num_prompt_logprobs: int = 0
    prompt_spans: list[PromptSpan] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return int(self.cu_q[-1])


class Result(Protocol):
    """What `settle` returns: tokens int32 [S] (-1 where logits were unusable), nan_flags uint8 [S].

    logprobs, where asked for: (chosen float32 [S], rank int32 [S], top_ids int32 [S, k], top_values float32 [S, k]);
    prompt_logprobs: the same over logit_rows.
    """

    tokens: np.ndarray
    nan_flags: np.ndarray
    logprobs: tuple[np.ndarray, ...] | None
    prompt_logprobs: tuple[np.ndarray, ...] | None


class StepRunner(Protocol):
    """What the loop needs of a runner. `launch` only enqueues; `settle` waits. Steps run in launch order."""

    num_blocks: int
    num_slots: int
    max_model_len: int
    vocab_size: int

    def launch(self, plan: StepPlan) -> Any: ...

    def settle(self, handle: Any) -> Result: ...
