"""Where each Engram hash head's rows lie: primes, offsets and multipliers, from the configuration alone.

Every (n-gram size, head) of a layer hashes into its own prime number of rows; the primes are distinct over all layers.
Needs numpy alone, since the reference network is built on it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class EngramLayer:
    """Rows of one Engram layer's table.

    `primes` and `offsets` have (max_ngram_size - 1) * heads entries, 2-grams first, heads innermost; a hash h of head i
    reads row offsets[i] + h mod primes[i]. `rows` is their sum: the height of the table.
    """

    layer: int
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


@lru_cache(maxsize=8)
def engram_layers(
    layer_ids: tuple[int, ...], max_ngram_size: int, heads: int, vocab_size: int
) -> tuple[EngramLayer, ...]:
    """The tables of all Engram layers in ascending layer order.

    Primes are given out in the order layer, n-gram size, head: the next prime that is at least `vocab_size` and above
    the previous one of this n-gram size, skipping every prime already used.
    """
    used: set[int] = set()
    layers = []
    for layer in layer_ids:
        primes = []
        for _ in range(2, max_ngram_size + 1):
            candidate = vocab_size - 1
            for _ in range(heads):
                candidate = _next_unused_prime(candidate, used)
                used.add(candidate)
                primes.append(candidate)
        offsets = [sum(primes[:i]) for i in range(len(primes))]
        layers.append(EngramLayer(layer, tuple(primes), tuple(offsets), sum(primes)))
    return tuple(layers)


def engram_multipliers(layer: int, max_ngram_size: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """The odd int64 multipliers of one layer, one per position of the n-gram, newest token first."""
    import numpy

    half_range = max(1, INT64_MAX // compressed_vocab_size // 2)
    drawn = numpy.random.default_rng(10007 * layer).integers(0, half_range, size=max_ngram_size)
    return tuple(int(value) * 2 + 1 for value in drawn)


def _next_unused_prime(after: int, used: set[int]) -> int:
    candidate = after + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    """Miller-Rabin with bases that decide every number below 3.3e24."""
    if number < 2:
        return False
    small = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    for prime in small:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, base, odd, twos) for base in small)


def _passes(number: int, base: int, odd: int, twos: int) -> bool:
    power = pow(base, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False
