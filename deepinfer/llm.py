"""LLM: batches of prompts in one call, streams, and log-probabilities, in the calling thread."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.build import build_engine
from deepinfer.engine.inputs import parse_prompt
from deepinfer.engine.loop import EngineCore
from deepinfer.errors import RequestError
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer

_REFRESH_SECONDS = 0.1


class LLM:
    """A loaded model. `settings` are the fields of EngineConfig. Calls of several threads take turns.

    Raises ConfigError, CheckpointError, CapacityError or BackendUnavailable before or while loading.
    """

    def __init__(self, model: str, backend: str = "auto", **settings: Any) -> None:
        self._attach(build_engine(EngineConfig.create(model=model, backend=backend, **settings)))

    @classmethod
    def from_engine(cls, engine: EngineCore) -> LLM:
        """An LLM around an engine that is at hand."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: EngineCore) -> None:
        self.engine, self._count = engine, 0
        self._arrived: dict[str, deque[RequestOutput]] = {}
        self._turn = threading.RLock()  # who steps gets the outputs of all, so a batch is run to its end before another begins

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: str | Mapping | Sequence,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output per prompt, in order; a bad prompt's output carries its error and harms no other.

        prompts: a string, a dict with `prompt` or `prompt_token_ids`, or a list of strings, dicts or id lists.
        sampling_params: one for all, or one per prompt. use_tqdm: progress with tokens per second on stderr.
        """
        many = _as_list(prompts)
        params = _per_prompt(sampling_params, len(many))
        with self._turn:
            return self._batch(many, params, use_tqdm and not self.config.disable_progress)

    def _batch(self, many: list[Any], params: Sequence[SamplingParams | None], show: bool) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        names = [self._name() for _ in many]
        try:
            for name, prompt, one in zip(names, many, params, strict=True):
                try:
                    self.engine.add_request(name, prompt, one)
                except RequestError as error:
                    outputs[name] = _refused(name, prompt, error)
            self._run(names, outputs, show)
        finally:
            self._forget(names)
        return [outputs[name] for name in names]

    def stream(
        self, prompt: str | Mapping | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Outputs of one prompt as its tokens arrive, each with what is new; closing the iterator ends the request.

        The first step of the iterator queues the request, and raises RequestError if it is bad; a later failure is the
        last output's `error`. Several streams may be open at a time.
        """
        with self._turn:
            name = self._name()
            self.engine.add_request(name, prompt, sampling_params, stream=True)
            inbox = self._arrived[name] = deque()
        try:
            while True:
                with self._turn:
                    while not inbox:
                        self._step()
                    output = inbox.popleft()
                yield output
                if output.finished:
                    return
        finally:
            self._forget([name])

    def score(self, token_ids: str | Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 [T, V]: log-probabilities of the next token after each position. Raises RequestError.

        Text is encoded as a prompt is. Needs the engine for itself: no stream may be open.
        """
        with self._turn:
            if self.engine.requests:
                raise RequestError("token_ids", "...", "score needs an idle engine: finish or close open streams first")
            _, ids = parse_prompt(token_ids, self.tokenizer, self.engine.runner.vocab_size)
            self.engine.settle_in_flight()
            return self.engine.runner.score(ids)

    def _name(self) -> str:
        self._count += 1
        return str(self._count - 1)

    def _step(self) -> list[RequestOutput]:
        """One step; what belongs to an open stream goes there, the rest comes back."""
        others = []
        for output in self.engine.step():
            inbox = self._arrived.get(output.request_id)
            others.append(output) if inbox is None else inbox.append(output)
        return others

    def _run(self, names: Sequence[str], outputs: dict[str, RequestOutput], show: bool) -> None:
        with _Progress(len(names), len(outputs), self.engine.generated_tokens, show) as progress:
            while len(outputs) < len(names):
                outputs.update((output.request_id, output) for output in self._step())
                progress.update(len(outputs), self.engine.generated_tokens)

    def _forget(self, names: Sequence[str]) -> None:
        with self._turn:
            for name in names:
                self.engine.abort(name)
                self._arrived.pop(name, None)


class _Progress:
    """Prompts done and tokens per second on stderr."""

    def __init__(self, total: int, done: int, tokens: int, show: bool) -> None:
        """done: prompts that need no work; tokens: what the engine had generated before."""
        self._bar, self._task, self._tokens = None, None, tokens
        self._start = self._last = time.monotonic()
        if show and total:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("Prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            speed = TextColumn("{task.fields[speed]:.0f} tok/s")
            self._bar = Progress(*columns, speed, console=Console(file=sys.stderr), auto_refresh=False)
            self._task = self._bar.add_task("", total=total, completed=done, speed=0.0)

    def __enter__(self) -> _Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.refresh()
            self._bar.stop()

    def update(self, done: int, tokens: int) -> None:
        if self._bar is None:
            return
        now = time.monotonic()
        speed = (tokens - self._tokens) / max(now - self._start, 1e-6)
        self._bar.update(self._task, completed=done, speed=speed)
        if now - self._last > _REFRESH_SECONDS:
            self._last = now
            self._bar.refresh()


def _as_list(prompts: Any) -> list[Any]:
    """A list of prompts; a bare list of ids is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError("prompts", prompts, "must be a string, a dict, or a list of prompts")
    many = list(prompts)
    if many and all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in many):
        return [many]
    return many


def _per_prompt(params: Any, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise RequestError("sampling_params", params, "must be a SamplingParams, or a list with one per prompt")
    params = list(params)
    if len(params) != count:
        raise RequestError("sampling_params", len(params), f"must be one for all prompts, or {count}, one per prompt")
    return params


def _refused(name: str, prompt: Any, error: RequestError) -> RequestOutput:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(name, text if isinstance(text, str) else None, [], [], True, str(error))
