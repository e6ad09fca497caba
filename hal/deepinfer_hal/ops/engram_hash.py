"""engram_hash: the table rows of each token's n-grams (V4.1 notes, section 2.10).

c_r = token_map[id at position p - r]; h_0 = c_0 M_0, h_r = h_(r-1) xor (c_r M_r), in int64; the n-gram of n = r + 1
tokens has Q heads, whose rows are h_r mod prime + offset. Output column (n - 2) Q + head.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._cost import touching


def engram_hash(
    ngrams: torch.Tensor,
    token_map: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad: int,
    count: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """ngrams i32 [T, N] (id at position p - n), token_map i32 [V], multipliers i64 [N], primes and offsets
    i64 [(N-1)Q] -> out i64 [T, (N-1)Q].

    From the first id outside 0..V-1 on (-1: before the start, or the window stops there), ids count as `pad`, which is
    already a compressed id. Products wrap in int64; with the model's multipliers they stay positive.
    """
    n, size = c.valid_rows(count, ngrams.shape[0]), ngrams.shape[1]
    heads = primes.shape[0] // (size - 1)
    ids = ngrams[:n].long()
    inside = ((ids >= 0) & (ids < token_map.shape[0])).to(torch.int32).cumprod(1).bool()
    compressed = token_map[ids.where(inside, 0)].long().where(inside, pad)
    mixed = compressed[:, 0] * multipliers[0]
    for r in range(1, size):
        mixed = mixed ^ (compressed[:, r] * multipliers[r])
        columns = slice((r - 1) * heads, r * heads)
        out[:n, columns] = torch.remainder(mixed[:, None], primes[columns]) + offsets[columns]


def _cases() -> list[Case]:
    rows = [
        dict(T=0, N=4, Q=8, V=259),
        dict(T=1, N=4, Q=8, V=259),
        dict(T=33, N=4, Q=8, V=259, count=29),
        dict(T=33, N=3, Q=2, V=259),
        dict(T=3, N=2, Q=1, V=300, released=True),
        dict(T=3, N=4, Q=8, V=99092, released=True),
    ]
    return [Case("engram_hash", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, size, heads = p["T"], p["N"], p["Q"]
    released = p.get("released", False)
    ngrams = torch.randint(0, p["V"], (rows, size), generator=gen)
    for row in range(min(rows, size)):
        ngrams[row, row:] = -1
    if rows > size:
        ngrams[size, 1] = -1
    start = 16_000_000 if released else 1000
    primes = _primes_from(start, (size - 1) * heads)
    multipliers = torch.randint(0, (2**63 - 1) // p["V"] // 2, (size,), generator=gen) * 2 + 1
    return {
        "ngrams": ngrams.to(torch.int32).to(device),
        "token_map": c.integers(gen, 0, p["V"], p["V"], device=device),
        "multipliers": multipliers.to(device),
        "primes": primes.to(device),
        "offsets": (primes.cumsum(0) - primes).to(device),
        "pad": 2,
        "count": c.count_tensor(p.get("count"), device),
        "out": c.poisoned(rows, (size - 1) * heads, dtype=torch.int64, device=device),
    }


def _primes_from(start: int, how_many: int) -> torch.Tensor:
    """The next primes from `start`, by trial division."""
    found: list[int] = []
    candidate = start | 1
    while len(found) < how_many:
        if all(candidate % d for d in range(3, int(candidate**0.5) + 1, 2)):
            found.append(candidate)
        candidate += 2
    return torch.tensor(found, dtype=torch.int64)


def _check(args: dict[str, Any]) -> None:
    size, rows = args["ngrams"].shape[1], args["primes"].shape[0]
    if size < 2 or rows % (size - 1):
        raise BadCall(f"engram_hash: {rows} primes do not divide into the {size - 1} n-gram sizes of windows of {size}")


CARD = register(
    OpCard(
        name="engram_hash",
        group="input",
        summary="Hashes each token's n-grams to rows of the Engram table.",
        signature=(
            tensor("ngrams", "i32", "T N"),
            tensor("token_map", "i32", "V"),
            tensor("multipliers", "i64", "N"),
            tensor("primes", "i64", "C"),
            tensor("offsets", "i64", "C"),
            scalar("pad", "int"),
            COUNT,
            out("out", "i64", "T C"),
        ),
        reference=engram_hash,
        rounding="none: int64",
        discrete=("out",),
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
        cost=touching(token_map=lambda args: 4 * args["ngrams"].numel()),
    )
)
