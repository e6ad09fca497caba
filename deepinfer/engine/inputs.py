"""From what a user gives as a prompt to checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.tokenizer import Tokenizer

_KEYS = ("prompt", "prompt_token_ids")


def parse_prompt(prompt: Any, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str | None, np.ndarray]:
    """(text or None, int32 ids) of a string, a list of ids, or a dict with `prompt` or `prompt_token_ids`.

    Text is encoded after a beginning-of-sentence token and never forms special tokens. Raises RequestError.
    """
    text = None
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data"):
            raise RequestError("multi_modal_data", "...", "images are not supported: this engine runs text only")
        unknown = [key for key in prompt if key not in (*_KEYS, "multi_modal_data")]
        if unknown:
            raise RequestError("prompt", unknown[0], f"is not a key of a prompt: {' or '.join(_KEYS)}")
        text = prompt.get("prompt")
        prompt = prompt.get("prompt_token_ids", text)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("prompt", prompt, "is text, but the model has no tokenizer: give prompt_token_ids")
        return prompt, _check_ids(tokenizer.encode(prompt), vocab_size)
    return text if isinstance(text, str) else None, _check_ids(prompt, vocab_size)


def _check_ids(ids: Any, vocab_size: int) -> np.ndarray:
    if not isinstance(ids, (Sequence, np.ndarray)) or isinstance(ids, (str, bytes)):
        raise RequestError("prompt", ids, "must be a string, a list of token ids, or a dict with one of them")
    if not len(ids):
        raise RequestError("prompt", ids, "is empty: give at least one token")
    if not isinstance(ids, np.ndarray):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise RequestError("prompt_token_ids", token, "must be a whole number")
            if not 0 <= token < vocab_size:
                raise RequestError("prompt_token_ids", token, f"is not a token id of this model: 0 to {vocab_size - 1}")
        return np.array(ids, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("prompt_token_ids", f"{ids.dtype} {ids.shape}", "must be one-dimensional whole numbers")
    return _check_ids(ids.tolist(), vocab_size)
