"""Numbers as people write and read them: `4k`, `1.5M`, `12.5 MiB`."""

from __future__ import annotations

import re

_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(ib)?", re.IGNORECASE | re.ASCII)
_LARGEST = 1 << 62


def human_int(text: str | int) -> int:
    """`4k` -> 4096, `1.5M` -> 1572864, `16GiB` -> 17179869184; plain digits and ints pass through.

    The suffixes k, M, G and T are powers of 1024 in either case, `iB` after them is optional. Raises ValueError for
    anything else, a negative number and a result that is not whole.
    """
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a number: write digits with an optional k, M, G or T, such as 4096 or 4k")
    if isinstance(text, int):
        value = text
    else:
        found = _NUMBER.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} is not a number: write digits with an optional k, M, G or T, such as 4096 or 4k"
            )
        digits, suffix, _ = found.groups()
        whole, _, fraction = digits.partition(".")
        scaled = int(whole + fraction) << (10 * _POWER[suffix.lower()])
        value, rest = divmod(scaled, 10 ** len(fraction))
        if rest:
            raise ValueError(f"{text!r} is not a whole number")
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"{text!r} is out of range: 0 to {_LARGEST}")
    return value


def format_bytes(nbytes: int) -> str:
    """Bytes with a binary unit and three or four digits: 1536 -> `1.50 KiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"


def format_count(count: int) -> str:
    """A count with a decimal suffix: 999 -> `999`, 15 250 000 -> `15.2 M`, 551.9e9 -> `552 G`."""
    size = float(count)
    for unit in ("", "k", "M", "G", "T"):
        if abs(size) < 999.5 or unit == "T":
            break
        size /= 1000
    if not unit:
        return str(count)
    return f"{size:.0f} {unit}" if abs(size) >= 99.95 else f"{size:.1f} {unit}"
