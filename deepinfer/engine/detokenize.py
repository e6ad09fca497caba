"""Text of a growing token list, one token at a time, never splitting a UTF-8 character."""

from __future__ import annotations

import codecs

from deepinfer.tokenizer import Tokenizer


class Detokenizer:
    """Bytes of an unfinished character wait for the next token; bytes that can begin none become U+FFFD at once."""

    __slots__ = ("_bytes", "_decoder", "_skipped")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is certain after this token; ids past the tokenizer's last (padding rows) give none."""
        if token in self._skipped or token >= len(self._bytes):
            return ""
        return self._decoder.decode(self._bytes[token])

    def flush(self) -> str:
        """U+FFFD for an unfinished character, at the end."""
        return self._decoder.decode(b"", final=True)
