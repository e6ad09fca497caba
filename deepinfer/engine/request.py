"""Requests and their sequences (one per choice): what was asked, what came so far, and why it ended."""

from __future__ import annotations

import numpy as np
from deepinfer_hal.philox import choice_seed, signed_seed

from deepinfer.engine.detokenize import Detokenizer
from deepinfer.engine.stops import StopFinder
from deepinfer.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer


class Request:
    """One prompt with its settings. `arrival` orders requests of equal priority (lower priority numbers go first)."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        *,
        arrival: int,
        arrival_time: float,
        seed: int,
        end_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
        priority: int = 0,
        stream: bool = False,
    ) -> None:
        """prompt_ids int32 [T], T >= 1. end_ids: the model's own end tokens. stream: outputs are deltas, one a step."""
        self.id, self.prompt, self.prompt_ids, self.params = request_id, prompt, prompt_ids, params
        self.priority, self.arrival, self.stream = priority, arrival, stream
        self.tokenizer = tokenizer if params.detokenize else None
        self.end_ids = frozenset() if params.ignore_eos else end_ids
        self.stop_ids = self.end_ids | frozenset(params.stop_token_ids or ())
        self.error: str | None = None
        wanted = params.prompt_logprobs is not None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if wanted else None
        self._prompt_list = prompt_ids.tolist()
        self.metrics = RequestMetrics(arrival_time, prompt_tokens=len(prompt_ids))
        seeds = [seed] if params.n == 1 else [choice_seed(seed, i) for i in range(params.n)]
        self.sequences = [Sequence(self, i, signed_seed(s)) for i, s in enumerate(seeds)]

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """Everything so far, or what is new since the last call if this request streams."""
        return RequestOutput(
            self.id,
            self.prompt,
            self._prompt_list,
            [sequence.output(self.stream) for sequence in self.sequences],
            self.finished,
            self.error,
            self.prompt_logprobs,
            self.metrics,
        )


class Sequence:
    """One choice of a request: its tokens, its text, and the slot and blocks that it holds while it runs."""

    __slots__ = (
        "_detokenizer",
        "_min_tokens",
        "_sent_parts",
        "_sent_tokens",
        "_stops",
        "_text",
        "blocks",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "key",
        "logprobs",
        "max_tokens",
        "output_ids",
        "prompt_scored",
        "request",
        "seed",
        "slot",
        "stop_reason",
    )

    def __init__(self, request: Request, index: int, seed: int) -> None:
        params = request.params
        self.request, self.index, self.seed = request, index, seed
        self.key = (request.priority, request.arrival, index)
        self.slot, self.blocks = -1, []
        self.output_ids: list[int] = []
        self.max_tokens: int | None = params.max_tokens
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.cumulative_logprob = 0.0
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.prompt_scored = 0 if params.prompt_logprobs is not None and index == 0 else len(request.prompt_ids)
        self._min_tokens = params.min_tokens
        self._text: list[str] = []
        self._sent_parts = self._sent_tokens = 0
        self._detokenizer = Detokenizer(request.tokenizer, params.skip_special_tokens) if request.tokenizer else None
        stops = params.stop_strings
        self._stops = StopFinder(stops, params.include_stop_str_in_output) if stops else None

    @property
    def all_ids(self) -> np.ndarray:
        """int32 prompt and output ids."""
        if not self.output_ids:
            return self.request.prompt_ids
        return np.concatenate([self.request.prompt_ids, np.asarray(self.output_ids, np.int32)])

    def accept(self, token: int) -> None:
        """Takes the next token, and decides whether it ends the sequence: stop id, stop string, then length."""
        self.output_ids.append(token)
        count = len(self.output_ids)
        if token in self.request.stop_ids and count > self._min_tokens:
            if self.request.params.include_stop_str_in_output:
                self._show(token, count)
            self.finish("stop", None if token in self.request.end_ids else token)
            return
        self._show(token, count)
        if self.finish_reason is None and count == self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Ends the sequence and shows the text that was held back. The first reason stays."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.stop_reason = reason, stop_reason
        tail = self._detokenizer.flush() if self._detokenizer else ""
        if self._stops:
            tail = self._stops.push(tail, active=False)[0] + self._stops.flush()
        if tail:
            self._text.append(tail)

    def _show(self, token: int, count: int) -> None:
        if self._detokenizer is None:
            return
        text = self._detokenizer.push(token)
        if self._stops is not None:
            text, stop = self._stops.push(text, active=count >= self._min_tokens)
            if stop is not None:
                self._text.append(text)
                self.finish_reason, self.stop_reason = "stop", stop
                return
        if text:
            self._text.append(text)

    def output(self, delta: bool) -> CompletionOutput:
        """All of it, or what is new since the last delta."""
        parts, tokens = (self._sent_parts, self._sent_tokens) if delta else (0, 0)
        if delta:
            self._sent_parts, self._sent_tokens = len(self._text), len(self.output_ids)
        return CompletionOutput(
            self.index,
            "".join(self._text[parts:]),
            self.output_ids[tokens:],
            None if self.logprobs is None else self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs[tokens:],
            self.finish_reason,
            self.stop_reason,
        )
