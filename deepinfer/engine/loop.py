"""The step loop: plan, launch, settle. Two variants side by side, with and without overlap, give the same tokens."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from deepinfer_hal.philox import choice_seed

from deepinfer.config import EngineConfig
from deepinfer.engine.inputs import parse_prompt
from deepinfer.engine.request import Request, Sequence
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.step_plan import Result, StepPlan, StepRunner
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.outputs import Logprob, RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer

_UNSEEDED = 0x756E736565646564
"""Keeps the seeds that the engine picks apart from those of choices."""


class EngineCore:
    """Requests in, outputs out, one `step` at a time. Not thread safe.

    With overlap, step N + 1 is planned and launched before step N is settled; a sequence that N turns out to have ended
    has its extra token dropped.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: StepRunner,
        tokenizer: Tokenizer | None,
        end_ids: frozenset[int] = frozenset(),
        overlap: bool = False,
    ) -> None:
        self.config, self.scheduler, self.runner, self.tokenizer = config, scheduler, runner, tokenizer
        self.end_ids, self.overlap = end_ids, overlap
        self.requests: dict[str, Request] = {}
        self._touched: dict[str, Request] = {}
        self._in_flight: tuple[StepPlan, Any] | None = None
        self._arrivals = 0
        self.generated_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests) or self._in_flight is not None

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = False,
    ) -> Request:
        """Checks and queues a request. Raises RequestError, and then nothing was queued."""
        if request_id in self.requests:
            raise RequestError("request_id", request_id, "is in use by a request that has not finished")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", params, "must be a SamplingParams")
        params.validate(self.runner.vocab_size)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop", params.stop, "needs text, but the model has no tokenizer: use stop_token_ids")
        text, ids = parse_prompt(prompt, self.tokenizer, self.runner.vocab_size)
        room = self.scheduler.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                "prompt", f"{len(ids)} tokens", f"must have at most {self.scheduler.max_model_len - 1} tokens here"
            )
        seed = choice_seed(self.config.seed ^ _UNSEEDED, self._arrivals) if params.seed is None else params.seed
        request = Request(
            request_id, text, ids, params, arrival=self._arrivals, arrival_time=time.monotonic(), seed=seed,
            end_ids=self.end_ids, tokenizer=self.tokenizer, priority=priority, stream=stream,
        )  # fmt: skip
        self._arrivals += 1
        self.requests[request_id] = request
        for sequence in request.sequences:
            sequence.max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
            self.scheduler.add(sequence)
        return request

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees all that it holds now; its last output, or None if it is not running."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._end(request, "abort")
        self._touched.pop(request_id, None)
        del self.requests[request_id]
        return request.output()

    def step(self) -> list[RequestOutput]:
        """One turn of the loop: outputs of streaming requests that moved, and of requests that finished."""
        return self.step_overlapped() if self.overlap else self.step_plain()

    def step_plain(self) -> list[RequestOutput]:
        """Plan, launch, settle, each waiting for the one before."""
        self._settle(self._launch(self.scheduler.plan()))
        return self._outputs()

    def step_overlapped(self) -> list[RequestOutput]:
        """Launches the next step before it settles the one in flight."""
        launched = self._launch(self.scheduler.plan())
        before, self._in_flight = self._in_flight, launched
        self._settle(before)
        return self._outputs()

    def check_idle(self) -> None:
        """RuntimeError if work remains, or if an idle engine has lost a block or a slot."""
        if self.has_unfinished:
            raise RuntimeError(f"{len(self.requests)} requests are unfinished")
        self.scheduler.check_integrity()

    def settle_in_flight(self) -> None:
        """Settles a step that was launched ahead for sequences that have ended since."""
        before, self._in_flight = self._in_flight, None
        self._settle(before)

    def _launch(self, plan: StepPlan | None) -> tuple[StepPlan, Any] | None:
        if plan is None:
            if self._in_flight is None:
                self._end_stalled()
            return None
        try:
            return plan, self.runner.launch(plan)
        except Exception as error:  # whatever a device raises belongs to the requests that were in the step
            self._fail(plan, error)
            return None

    def _settle(self, launched: tuple[StepPlan, Any] | None) -> None:
        if launched is None:
            return
        plan, handle = launched
        try:
            result = self.runner.settle(handle)
        except Exception as error:
            self._fail(plan, error)
            return
        if plan.prompt_spans:
            self._take_prompt_logprobs(plan, result.prompt_logprobs)
        self._take_tokens(plan, result)

    def _take_tokens(self, plan: StepPlan, result: Result) -> None:
        tokens = np.where(result.nan_flags != 0, -1, result.tokens).tolist()
        now, touched = time.monotonic(), self._touched
        for row, sequence in enumerate(plan.sampled):
            if sequence.finish_reason is not None:
                continue
            request, token = sequence.request, tokens[row]
            if request.stream:
                touched[request.id] = request
            if token < 0:
                touched[request.id] = request
                self._end(request, "error", "the model's logits held NaN, or every token was banned")
                continue
            sequence.accept(token)
            if sequence.logprobs is not None:
                self._take_logprobs(sequence, token, row, result.logprobs)
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            request.metrics.output_tokens += 1
            self.generated_tokens += 1
            if sequence.finish_reason is not None:
                touched[request.id] = request
                self.scheduler.release(sequence)

    def _take_logprobs(self, sequence: Sequence, token: int, row: int, found: tuple[np.ndarray, ...]) -> None:
        entry = self._alternatives(token, row, found, sequence.request.params.logprobs or 0)
        sequence.cumulative_logprob += entry[token].logprob
        sequence.logprobs.append(entry)

    def _take_prompt_logprobs(self, plan: StepPlan, found: tuple[np.ndarray, ...]) -> None:
        row = 0
        for span in plan.prompt_spans:
            request = span.sequence.request
            for at in range(row, row + span.count):
                entry = self._alternatives(int(plan.logit_targets[at]), at, found, request.params.prompt_logprobs or 0)
                request.prompt_logprobs.append(entry)
            row += span.count

    def _alternatives(self, token: int, row: int, found: tuple[np.ndarray, ...], count: int) -> dict[int, Logprob]:
        """The chosen token first, then the `count` most probable ones by rank."""
        chosen, rank, ids, values = found
        entry = {token: Logprob(float(chosen[row]), int(rank[row]), self._text(token))}
        for place in range(count):
            other = int(ids[row, place])
            entry.setdefault(other, Logprob(float(values[row, place]), place + 1, self._text(other)))
        return entry

    def _text(self, token: int) -> str | None:
        if self.tokenizer is None or not self.tokenizer.is_valid(token):
            return None
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _end_stalled(self) -> None:
        """With nothing in flight and nothing to run, what remains would wait forever: a fault, reported as one."""
        for request in self.requests.values():
            self._touched[request.id] = request
            self._end(request, "error", "the scheduler found nothing to run: this is a fault of the engine")

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        message = str(error) if isinstance(error, DeepInferError) else f"{type(error).__name__}: {error}"
        for sequence in plan.sequences:
            if sequence.finish_reason is None:
                self._touched[sequence.request.id] = sequence.request
                self._end(sequence.request, "error", f"the step failed: {message}")

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        request.error = request.error or error
        for sequence in request.sequences:
            sequence.finish(reason)
            self.scheduler.release(sequence)

    def _outputs(self) -> list[RequestOutput]:
        outputs = []
        for request in self._touched.values():
            finished = request.finished
            if finished:
                request.metrics.finished_time = time.monotonic()
                self.requests.pop(request.id, None)
            if finished or request.stream:
                outputs.append(request.output())
        self._touched.clear()
        return outputs
