"""AsyncLLM: the engine in a thread of its own, and one asyncio stream per request."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer.config import EngineConfig
from deepinfer.engine.build import build_engine
from deepinfer.engine.loop import EngineCore
from deepinfer.errors import EngineStopped, RequestError
from deepinfer.outputs import CompletionOutput, RequestOutput
from deepinfer.sampling_params import SamplingParams

OutputKind = Literal["cumulative", "delta", "final"]


@dataclass
class _Stream:
    """Where the engine's thread delivers a request's outputs, or the exception that ended it."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)

    def deliver(self, item: RequestOutput | Exception) -> bool:
        """False if the event loop is closed: nobody listens any more."""
        try:
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, item)
        except RuntimeError:
            return False
        return True


class AsyncLLM:
    """A loaded model for asyncio. `settings` are the fields of EngineConfig; loading blocks, as LLM's does."""

    def __init__(self, model: str, backend: str = "auto", **settings: Any) -> None:
        self._attach(build_engine(EngineConfig.create(model=model, backend=backend, **settings)))

    @classmethod
    def from_engine(cls, engine: EngineCore) -> AsyncLLM:
        """An AsyncLLM around an engine that is at hand, and that from now on is its own."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: EngineCore) -> None:
        self.engine, self._count = engine, 0
        self._streams: dict[str, _Stream] = {}
        self._keys: dict[str, str] = {}
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock, self._stopped = threading.Lock(), False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="deepinfer-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs until one is finished: all so far ("cumulative"), what is new ("delta"), or only the last.

        Leaving the loop or cancelling the task aborts the request. Raises RequestError for a bad request and
        EngineStopped after shutdown; a failure while it runs is the last output's `error`.
        """
        if output_kind not in ("cumulative", "delta", "final"):
            raise RequestError("output_kind", output_kind, "must be cumulative, delta or final")
        key, stream = self._open(request_id, asyncio.get_running_loop())
        arguments = (key, prompt, sampling_params, priority, output_kind != "final")
        self._commands.put(("add", arguments))
        whole: RequestOutput | None = None
        finished = False
        try:
            while not finished:
                item = await stream.inbox.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished, item.request_id = item.finished, stream.request_id
                if output_kind == "cumulative":
                    item = whole = _joined(whole, item)
                yield item
        finally:
            self._close(key, stream)
            if not finished:
                self._commands.put(("abort", key))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last output with finish_reason "abort". An unknown id is no error."""
        with self._lock:
            key = self._keys.get(request_id)
        if key is not None:
            self._commands.put(("abort", key))

    def shutdown(self, timeout: float | None = 30.0) -> None:
        """Stops the engine; open streams end with EngineStopped. May be called twice, from any thread."""
        with self._lock:
            self._stopped = True
        self._commands.put(("stop", None))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _open(self, request_id: str | None, loop: asyncio.AbstractEventLoop) -> tuple[str, _Stream]:
        """A stream and the engine's own key for it: an id may be used again at once, a key never is."""
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine has stopped; make a new AsyncLLM") from self._cause
            key, self._count = str(self._count), self._count + 1
            name = f"request-{key}" if request_id is None else request_id
            if name in self._keys:
                raise RequestError("request_id", name, "is in use by a request that has not finished")
            self._keys[name], self._streams[key] = key, _Stream(name, loop)
            return key, self._streams[key]

    def _close(self, key: str, stream: _Stream) -> None:
        with self._lock:
            self._streams.pop(key, None)
            self._keys.pop(stream.request_id, None)

    def _work(self) -> None:
        """The engine's thread: takes commands, steps while there is work, sleeps in the queue when there is none."""
        try:
            while self._take_commands():
                for output in self.engine.step() if self.engine.has_unfinished else ():
                    self._deliver(output)
            error: Exception = EngineStopped("the engine was shut down")
        except BaseException as cause:  # a fault of the engine itself must reach everyone who waits
            error = EngineStopped(f"the engine failed: {type(cause).__name__}: {cause}")
            error.__cause__ = self._cause = cause
        with self._lock:
            self._stopped = True
            streams = list(self._streams.values())
        for key in list(self.engine.requests):
            with contextlib.suppress(Exception):
                self.engine.abort(key)
        for stream in streams:
            stream.deliver(error)

    def _take_commands(self) -> bool:
        """Handles what is queued, waiting for the first if the engine is idle; False to stop."""
        wait = not self.engine.has_unfinished
        while True:
            try:
                command, argument = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if command == "stop":
                return False
            if command == "abort":
                output = self.engine.abort(argument)
                if output is not None:
                    self._deliver(output)
            else:
                self._add(*argument)

    def _add(self, key: str, prompt: Any, params: SamplingParams | None, priority: int, stream: bool) -> None:
        try:
            self.engine.add_request(key, prompt, params, priority=priority, stream=stream)
        except Exception as error:  # whatever is wrong with this request is its own
            found = self._streams.get(key)
            if found is not None:
                found.deliver(error)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if (stream is None or not stream.deliver(output)) and not output.finished:
            self.engine.abort(output.request_id)


def _joined(whole: RequestOutput | None, delta: RequestOutput) -> RequestOutput:
    """`whole` with the delta's news appended, as a new output."""
    if whole is None:
        return delta
    outputs = [
        CompletionOutput(
            new.index,
            old.text + new.text,
            old.token_ids + new.token_ids,
            new.cumulative_logprob,
            None if new.logprobs is None else (old.logprobs or []) + new.logprobs,
            new.finish_reason,
            new.stop_reason,
        )
        for old, new in zip(whole.outputs, delta.outputs, strict=True)
    ]
    return RequestOutput(
        delta.request_id, delta.prompt, delta.prompt_token_ids, outputs, delta.finished, delta.error,
        delta.prompt_logprobs, delta.metrics,
    )  # fmt: skip
