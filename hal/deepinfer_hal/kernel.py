"""What a provider offers: kernels, each for one op card, and their answer to `supports`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

INVARIANCE = ("yes", "unknown", "no")
"""What a kernel may state of its batch invariance, strongest first."""


@dataclass(frozen=True)
class Yes:
    """The kernel serves the call."""


@dataclass(frozen=True)
class No:
    """The kernel does not serve the call, and why."""

    reason: str


@dataclass(frozen=True)
class CallSpec:
    """What is known of a call when it is bound: the op, static sizes, dtypes and formats, never token counts.

    statics: e.g. {"x": "u8", "out": "bf16", "N": 5120, "K": 1280, "format": "fp8_32"}. A name may be absent: a caller need
    not know all, and a part of a composite is bound knowing none. A kernel answers Yes only if it serves every call that
    the statics leave open.
    """

    op: str
    statics: Mapping[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op card, called with the card's arguments in order.

    provider: who offers it ("reference", "cpu", ...); symbol: the native symbol or Python name, recorded in reports;
    invariant: "yes" | "no" | "unknown"; capturable: neither allocates nor synchronises; priority: higher is preferred.
    """

    op: str
    provider: str
    fn: Callable[..., None]
    symbol: str
    invariant: str = "unknown"
    capturable: bool = False
    priority: int = 0
    supports: Callable[[CallSpec], Yes | No] = lambda call: Yes()


def reference_kernel(card: Any) -> Kernel:
    """The card's reference as a kernel: always supported, lowest priority."""
    return Kernel(card.name, "reference", card.reference, f"reference::{card.name}", card.reference_invariant, priority=-1000)
