"""How one request's tokens are chosen: vLLM's names and defaults, checked in one place for every backend."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from deepinfer.errors import RequestError

MAX_CHOICES = 1024
MAX_LOGPROBS = 1000
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 1024
LOWEST_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings of one request. Construction checks all that needs no vocabulary; RequestError otherwise.

    - n: choices per prompt. seed: 64 bits; choice i of n > 1 uses SHA-256(seed, i). None lets the engine pick one.
    - temperature: 0 is exact greedy. top_k: 0 or -1 keeps all. top_p counts mass within what top_k left. min_p is
      relative to the most probable token.
    - presence_penalty, frequency_penalty, repetition_penalty, logit_bias: added or applied to the logits, on tokens of
      the output (repetition: and of the prompt).
    - stop, stop_token_ids: end a choice; the text is cut before a stop string (after it, with
      include_stop_str_in_output). ignore_eos: the model's own end tokens do not end it. min_tokens: nothing ends a
      choice earlier.
    - max_tokens: None runs to the longest sequence that the engine holds.
    - logprobs, prompt_logprobs: how many of the most probable tokens to return per token, 0 for the chosen one alone;
      of the model, before penalties and temperature.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self.check()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever form it has."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """Everything but ids. Raises RequestError naming the parameter, its value and what would be right."""
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, math.inf)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise RequestError(
                "temperature", self.temperature, f"is below {LOWEST_TEMPERATURE}: use 0 for greedy decoding"
            )
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p", self.top_p, "must be above 0 and at most 1")
        _integer("top_k", self.top_k, -1, 1 << 31)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty", self.repetition_penalty, "must be above 0; 1 is off")
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
            if self.min_tokens > self.max_tokens:
                raise RequestError("min_tokens", self.min_tokens, f"exceeds max_tokens {self.max_tokens}")
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be true or false")
        self._check_stops()
        self._check_bias()

    def validate(self, vocab_size: int) -> None:
        """`check`, and every token id against the vocabulary."""
        self.check()
        for name, ids in (("stop_token_ids", self.stop_token_ids or ()), ("logit_bias", self.logit_bias or ())):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(name, token, f"is not a token id of this model: 0 to {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise RequestError(name, getattr(self, name), f"exceeds the vocabulary of {vocab_size}")

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, (str, list, tuple)):
            raise RequestError("stop", self.stop, "must be a string or a list of strings")
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError("stop", len(strings), f"has too many strings: at most {MAX_STOP_STRINGS}")
        for text in strings:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise RequestError("stop", text, f"must be a string of 1 to {MAX_STOP_LENGTH} characters")
        if strings and not self.detokenize:
            raise RequestError("stop", self.stop, "needs text: set detokenize=True or use stop_token_ids")
        if self.stop_token_ids is not None:
            ids = self.stop_token_ids
            if not isinstance(ids, (list, tuple)) or len(ids) > MAX_STOP_IDS:
                raise RequestError("stop_token_ids", ids, f"must be a list of at most {MAX_STOP_IDS} ids")
            for token in ids:
                _integer("stop_token_ids", token, 0, (1 << 31) - 1)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise RequestError("logit_bias", self.logit_bias, "must map token ids to numbers")
        for token, value in self.logit_bias.items():
            _integer("logit_bias", token, 0, (1 << 31) - 1)
            if not _is_number(value) or math.isnan(value) or value == math.inf or value > 1e30:
                raise RequestError("logit_bias", {token: value}, "must be a finite number, or -inf to ban the token")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(name: str, value: Any, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high or math.isinf(value):
        bounds = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise RequestError(name, value, f"must be a finite number {bounds}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(name, value, f"must be a whole number from {low} to {high}")
