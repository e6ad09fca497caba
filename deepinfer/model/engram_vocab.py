"""Engram's view of the vocabulary: the token map made from a tokenizer, and the hash constants made from the config.

The token map folds spellings that differ only in case, accents or surrounding blanks into one id, so that n-grams of
different surface forms share table rows.
"""

import re
import unicodedata

import numpy
import torch

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
    """Layer -> its primes, 2-grams first, heads innermost.

    In the order layer, n-gram size, head: the next prime above the previous one of that n-gram size (starting at
    `engram_vocab_size` - 1), skipping primes already used anywhere.
    """
    used: set[int] = set()
    primes = {}
    for layer in config.engram_layer_ids:
        primes[layer] = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            number = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                number += 1
                while number in used or not _is_prime(number):
                    number += 1
                used.add(number)
                primes[layer].append(number)
    return primes


def engram_multipliers(layer: int, config) -> list[int]:
    """The odd int64 multipliers of one layer, one per n-gram position, newest token first."""
    half = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    drawn = numpy.random.default_rng(10007 * layer).integers(0, half, size=config.engram_max_ngram_size)
    return [2 * int(value) + 1 for value in drawn]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
