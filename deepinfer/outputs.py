"""What a request gives back: vLLM's names."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(msgspec.Struct):
    """Natural log-probability of a token, its rank (1 is the most probable), and its own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct):
    """One choice of a request. In a delta, text, token_ids and logprobs are what is new since the delta before.

    logprobs: per token, the chosen one and the most probable ones by id. finish_reason is None while it runs;
    stop_reason is the stop string or token id that ended it (None for the model's own end token).
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct):
    """Times in seconds of time.monotonic(); counts in tokens."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0


class RequestOutput(msgspec.Struct):
    """All choices of a request. error says why it failed; a request refused at once has no outputs.

    prompt_logprobs: one entry per prompt token, None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
