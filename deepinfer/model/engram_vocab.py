"""Engram's view of the vocabulary: the token map made from a tokenizer, and the hash constants made from the config.

The token map folds spellings that differ only in case, accents or surrounding blanks into one id, so that n-grams of
different surface forms share table rows.
"""

import re
import unicodedata

import torch

from deepinfer import engram_layout

_BLANKS = re.compile(r"[ \t\r\n]+")
_REPLACEMENT_CHARACTER = "\ufffd"


def engram_token_map(tokenizer_json_path, vocab: int) -> torch.Tensor:
    """int32 [vocab]: raw token id to compressed id, ids given in first-seen order over the tokenizer's ids.

    Ids past the tokenizer's own (the padding of an embedding table) never occur in text; they share compressed id 0.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json_path))
    seen: dict[str, int] = {}
    token_map = torch.zeros(vocab, dtype=torch.int32)
    for token_id in range(min(vocab, tokenizer.get_vocab_size(with_added_tokens=True))):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = tokenizer.id_to_token(token_id) if _REPLACEMENT_CHARACTER in text else _fold(text)
        token_map[token_id] = seen.setdefault(key, len(seen))
    return token_map


def _fold(text: str) -> str:
    """NFKC, NFD, accents off, lower case, runs of blanks to one space, stripped.

    A lone space is kept; a text that folds to nothing keeps its raw spelling.
    """
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c) != "Mn").lower()
    folded = _BLANKS.sub(" ", folded)
    if folded == " ":
        return folded
    return folded.strip() or text


def engram_primes(config) -> dict[int, list[int]]:
    """Layer -> its primes, 2-grams first, heads innermost."""
    layers = engram_layout.engram_layers(
        tuple(config.engram_layer_ids), config.engram_max_ngram_size, config.engram_n_heads, config.engram_vocab_size
    )
    return {layer.layer: list(layer.primes) for layer in layers}


def engram_multipliers(layer: int, config) -> list[int]:
    """The odd int64 multipliers of one layer, one per n-gram position, newest token first."""
    return list(
        engram_layout.engram_multipliers(layer, config.engram_max_ngram_size, config.engram_compressed_vocab_size)
    )
