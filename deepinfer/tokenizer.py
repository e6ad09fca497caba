"""The checkpoint's byte-level BPE tokenizer: text to ids and back, and what each id is in bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend

from deepinfer.errors import ConfigError, RequestError


class Tokenizer:
    """Wraps tokenizer.json.

    `encode` treats text as a user's: no text becomes a special or structural token, whatever it spells.
    token_bytes[i] is what id i stands for, so decoding is joining bytes.
    """

    def __init__(self, content: str, settings: dict[str, Any] | None = None) -> None:
        """content: tokenizer.json; settings: tokenizer_config.json. Raises ConfigError."""
        spec, settings = json.loads(content), settings or {}
        if not _is_byte_level(spec.get("decoder")):
            raise ConfigError("tokenizer", "tokenizer.json has no ByteLevel decoder: only byte-level BPE is supported")
        self._with_specials = _Backend.from_str(content)
        self._plain = _Backend.from_str(json.dumps(_without_added_tokens(spec)))
        self.added = {token["content"]: token["id"] for token in spec.get("added_tokens") or ()}
        self.special_ids = frozenset(t["id"] for t in spec.get("added_tokens") or () if t.get("special"))
        vocab = self._with_specials.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.token_bytes: list[bytes] = [b""] * self.vocab_size
        for token, index in vocab.items():
            self.token_bytes[index] = token.encode() if token in self.added else _to_bytes(token)
        self.bos_id = self._named(settings.get("bos_token"))
        self.eos_id = self._named(settings.get("eos_token"))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json and, if present, tokenizer_config.json. Raises ConfigError naming the file."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError("tokenizer", f"{path} is absent; without it only token ids can be given")
        extra = folder / "tokenizer_config.json"
        try:
            settings = json.loads(extra.read_text(encoding="utf-8")) if extra.is_file() else {}
            return cls(path.read_text(encoding="utf-8"), settings)
        except ConfigError:
            raise
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError("tokenizer", f"{path} cannot be read: {error}") from error

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`, after the beginning-of-sentence id if add_bos.

        parse_special: let special and structural tokens that the text spells become those tokens (for templates, never
        for a user's words). Raises RequestError for text that is no valid Unicode.
        """
        backend = self._with_specials if parse_special else self._plain
        try:
            ids = backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("prompt", text, f"is not valid Unicode text ({error})") from error
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. RequestError for an id outside the vocabulary."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.bytes_of(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Bytes of an id; RequestError if it is none."""
        if not self.is_valid(token):
            raise RequestError("token_ids", token, f"is not a token id: 0 to {self.vocab_size - 1}")
        return self.token_bytes[token]

    def is_valid(self, token: int) -> bool:
        return 0 <= token < self.vocab_size

    def _named(self, token: str | dict | None) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else self._with_specials.token_to_id(content)


def _is_byte_level(decoder: dict | None) -> bool:
    if not decoder:
        return False
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(part) for part in decoder.get("decoders", ()))
    return decoder.get("type") == "ByteLevel"


def _without_added_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """The same BPE without added tokens, in the model's vocabulary either: no text can then form one."""
    added = {token["content"] for token in spec.get("added_tokens") or ()}
    used = {piece for merge in spec["model"].get("merges", ()) for piece in _merge_pieces(merge)}
    kept = {token: i for token, i in spec["model"]["vocab"].items() if token not in added or token in used}
    return {**spec, "added_tokens": [], "post_processor": None, "model": {**spec["model"], "vocab": kept}}


def _merge_pieces(merge: str | list[str]) -> tuple[str, ...]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    """A token's bytes; one with a character outside the alphabet stands for its own UTF-8."""
    try:
        return bytes(_ALPHABET[c] for c in token)
    except KeyError:
        return token.encode()
