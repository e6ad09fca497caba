"""What the host itself costs: planning and settling a step with a runner that does nothing, and calling a bound op."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from deepinfer_hal.card import OpCard, all_cards
from deepinfer_hal.ceilings import spread
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.registry import open_backend
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from deepinfer.config import EngineConfig
from deepinfer.engine.build import assemble
from deepinfer.engine.loop import EngineCore
from deepinfer.model_path import resolve_model
from deepinfer.sampling_params import SamplingParams
from deepinfer.tokenizer import Tokenizer

_PROMPT_TOKENS = 128
_BLOCK_TOKENS = 128
_CALLS = 2000
_ROUNDS = 5


@dataclass
class NullRunner:
    """Does nothing: every row's next token is the next of a fixed sequence."""

    num_blocks: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    _count: int = 0

    def launch(self, plan: Any) -> int:
        return len(plan.sampled)

    def settle(self, rows: int) -> Any:
        self._count += 1
        tokens = (np.arange(rows, dtype=np.int32) * 7 + self._count) % self.vocab_size
        return SimpleNamespace(tokens=tokens, nan_flags=np.zeros(rows, np.uint8), logprobs=None, prompt_logprobs=None)


def measure_host(model: str, backend: str, num_seqs: int, steps: int) -> dict[str, Any]:
    """Milliseconds of plan + settle per decode step of num_seqs sequences, and microseconds of a bound call."""
    tokenizer = Tokenizer.from_folder(resolve_model(model))
    return {
        "num_seqs": num_seqs,
        "steps": steps,
        "plan_and_settle_ms": step_times(tokenizer, num_seqs, steps),
        "bound_call_us": bound_call_overhead(backend),
    }


def step_times(tokenizer: Tokenizer, num_seqs: int, steps: int) -> dict[str, float]:
    """Milliseconds of one decode step with detokenisation: median, min, max and 99th percentile."""
    engine = _null_engine(tokenizer, num_seqs, steps)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=steps + 8, ignore_eos=True)
    for number in range(num_seqs):
        engine.add_request(str(number), [number % tokenizer.vocab_size] * _PROMPT_TOKENS, params)
    while any(not sequence.output_ids for request in engine.requests.values() for sequence in request.sequences):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    return {**spread(times), "p99": float(np.percentile(times, 99))}


def _null_engine(tokenizer: Tokenizer, num_seqs: int, steps: int) -> EngineCore:
    length = _PROMPT_TOKENS + steps + 16
    blocks = num_seqs * -(-length // _BLOCK_TOKENS)
    config = EngineConfig.create(model="null", max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
    runner = NullRunner(blocks, num_seqs, length, tokenizer.vocab_size)
    return assemble(config, runner, tokenizer, frozenset(), overlap=False)


def bound_call_overhead(backend_spec: str) -> dict[str, Any]:
    """Microseconds of calls on no rows, where a kernel has nothing to do: bound through the dispatcher, and bare.

    `call`: a bound call in all, which bounds its overhead from above; `added`: what binding adds to the kernel's own
    callable. Median over the ops that have kernels and a case without rows; None where a backend has no such kernel.
    """
    backend, index = open_backend(backend_spec)
    dispatcher = Dispatcher(backend, index)
    cards, rows = all_cards(), {}
    for kernel in backend.kernels(index):
        args = _empty_call(cards[kernel.op], backend, index)
        if args is not None and kernel.op not in rows:
            rows[kernel.op] = _time_pair(dispatcher.bind(kernel.op), kernel.fn, args)
    if not rows:
        return {"ops": 0, "call": None, "added": None}
    slowest = max(rows, key=lambda op: rows[op][0])
    return {
        "ops": len(rows),
        "call": spread([bound for bound, _ in rows.values()]),
        "added": spread([bound - bare for bound, bare in rows.values()]),
        "slowest_op": slowest,
    }


def _empty_call(card: OpCard, backend: Any, index: int) -> list[Any] | None:
    """Arguments of the first enumerated case of a card whose outputs have no rows."""
    device = backend.device(index)

    def prepare(role: str, canonical: CanonicalWeight) -> WeightHandle:
        return backend.prepare_weight(index, role, canonical)

    for case in card.enumerate_cases():
        args = card.generate(case, 0, device, prepare)
        outputs = [args[arg.name] for arg in card.signature if arg.kind == "out" and args[arg.name] is not None]
        if outputs and all(isinstance(value, torch.Tensor) and value.numel() == 0 for value in outputs):
            return list(args.values())
    return None


def _time_pair(bound: Callable[..., None], bare: Callable[..., None], args: list[Any]) -> tuple[float, float]:
    """Microseconds a call of each, timed in turns; the median of the rounds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for function, kept in zip((bound, bare), times, strict=True):
            start = time.perf_counter()
            for _ in range(_CALLS):
                function(*args)
            kept.append(1e6 * (time.perf_counter() - start) / _CALLS)
    return statistics.median(times[0]), statistics.median(times[1])
