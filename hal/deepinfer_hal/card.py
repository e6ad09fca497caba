"""Op cards: the single source of truth of an op.

A card holds the signature, the rounding points, what an empty problem does, the reference in plain torch, the tolerance as a
formula, the batch-invariance clause, the cases, and the bytes and FLOPs of a call. Docs, argument checks, conformance and
benchmarks are made from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer_hal.errors import BadCall

DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "stream": (torch.bfloat16, torch.float32),
    "float": (torch.bfloat16, torch.float32),
    "act": (torch.bfloat16, torch.float32, torch.uint8),
    "bf16": (torch.bfloat16,),
    "f32": (torch.float32,),
    "u8": (torch.uint8,),
    "i32": (torch.int32,),
    "i64": (torch.int64,),
    "number": (torch.bfloat16, torch.float32, torch.int32),
    "any": (torch.bfloat16, torch.float32, torch.uint8, torch.int32, torch.int64),
}


@dataclass(frozen=True)
class Arg:
    """One argument of an op.

    kind: "in", "out", "inout" (tensors), "weight" (a WeightHandle), "comm" (a Communicator, whose number of ranks is the size
    `world`), or a host scalar "int" | "float" | "bool" | "str".
    dims: symbolic names or "" for a scalar; a name seen twice must have one size. A dim such as "K/32" or "T*k" is an
    expression of names; "_" is any size; "..." as the only dim means any shape.
    """

    name: str
    kind: str
    dtype: str = ""
    dims: tuple[str, ...] = ()
    optional: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("in", "out", "inout")


def tensor(name: str, dtype: str, dims: str, *, optional: bool = False) -> Arg:
    """Input tensor; `dims` is a space-separated list of names."""
    return Arg(name, "in", dtype, tuple(dims.split()), optional)


def out(name: str, dtype: str, dims: str, *, optional: bool = False) -> Arg:
    """Output tensor, preallocated by the caller and written in place."""
    return Arg(name, "out", dtype, tuple(dims.split()), optional)


def inout(name: str, dtype: str, dims: str, *, optional: bool = False) -> Arg:
    """Tensor that is read and updated in place."""
    return Arg(name, "inout", dtype, tuple(dims.split()), optional)


def weight(name: str, dims: str, *, optional: bool = False) -> Arg:
    """A WeightHandle of the given logical shape."""
    return Arg(name, "weight", "", tuple(dims.split()), optional)


def scalar(name: str, kind: str) -> Arg:
    """Host scalar: kind is int, float, bool or str."""
    return Arg(name, kind)


COMM = Arg("comm", "comm")
"""The ranks that an op of the communication group runs on; every rank makes the same call."""

COUNT = Arg("count", "in", "i32", ("1",), optional=True)
"""Device count of valid rows; rows past it are no-ops whose outputs stay untouched. None means all rows."""


@dataclass(frozen=True)
class Tolerance:
    """Allowed |difference| = atol + rtol * |reference|, per element, against the float64 (or exact) reference."""

    rtol: float = 0.0
    atol: float = 0.0


EXACT = Tolerance()


def sum_tolerance(dtype: torch.dtype, reduction: int, magnitude: float = 1.0) -> Tolerance:
    """Tolerance of a value that is an FP32 sum of `reduction` products of size about `magnitude`, rounded once to `dtype`.

    One rounding to dtype costs eps/2 relative; summing n FP32 terms in any order costs about eps32 * sqrt(n) * |terms|
    in practice, for which 4x is allowed.
    """
    eps = torch.finfo(dtype).eps
    eps32 = torch.finfo(torch.float32).eps
    return Tolerance(rtol=eps + 4 * eps32, atol=4 * eps32 * math.sqrt(max(reduction, 1)) * magnitude + 1e-30)


@dataclass(frozen=True)
class Case:
    """One enumerated problem of an op; the printed parameters are its id and replay it."""

    op: str
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.op}({','.join(f'{k}={v}' for k, v in self.params.items())})"


@dataclass(frozen=True)
class Cost:
    """Bytes that a call must move at least (each input read once, each output written once) and its FLOPs."""

    bytes: int
    flops: int = 0


def default_cost(args: Mapping[str, Any], updated: tuple[str, ...] = ()) -> Cost:
    """Bytes of every tensor and weight argument, once, and twice for `updated` ones; no FLOPs counted."""
    total = 0
    for name, value in args.items():
        times = 2 if name in updated else 1
        if isinstance(value, torch.Tensor):
            total += times * value.numel() * value.element_size()
        elif hasattr(value, "nbytes") and hasattr(value, "role"):
            total += value.nbytes
    return Cost(total)


@dataclass(frozen=True)
class OpCard:
    """See the module docstring. `reference` takes exactly the signature's arguments, positionally or by name.

    tolerance(args, name) gives the Tolerance of output `name` for a call; discrete outputs are compared exactly, except
    where a decision lies within tolerance of its boundary. generate(case, seed, device, prepare) returns the arguments
    by name, outputs allocated; `prepare(role, canonical)` makes a WeightHandle. cost defaults to `default_cost`, with what
    the signature says is updated in place counted twice.

    A composite (decomposition is not empty) calls other cards. Its reference takes them as the keyword `parts`, an object
    with one callable per op of the decomposition, so that a backend with kernels for the parts alone serves it too.
    """

    name: str
    group: str
    summary: str
    signature: tuple[Arg, ...]
    reference: Callable[..., None]
    rounding: str = "none"
    empty: str = "zero rows: returns at once, nothing is written"
    invariance: str = "each row depends on its own inputs alone"
    reference_invariant: str = "yes"
    tolerance: Callable[[Mapping[str, Any], str], Tolerance] = lambda args, name: EXACT
    discrete: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Any]], None] | None = None
    enumerate_cases: Callable[[], Iterable[Case]] = lambda: ()
    generate: Callable[..., dict[str, Any]] | None = None
    cost: Callable[[Mapping[str, Any]], Cost] | None = None
    workspace_nbytes: Callable[[Mapping[str, int]], int] = lambda bounds: 0
    decomposition: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.cost is None:
            updated = tuple(arg.name for arg in self.signature if arg.kind == "inout")
            object.__setattr__(self, "cost", functools.partial(default_cost, updated=updated))

    @property
    def arg_names(self) -> tuple[str, ...]:
        return tuple(arg.name for arg in self.signature)

    def bind_args(self, values: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """Positional and named values as one dict in signature order; BadCall names what is missing or unknown."""
        names = self.arg_names
        if len(values) > len(names):
            raise BadCall(f"{self.name}: takes {len(names)} arguments, got {len(values)}")
        bound = dict(zip(names, values, strict=False))
        for name, value in named.items():
            if name not in names:
                raise BadCall(f"{self.name}: unknown argument {name!r}; the signature is ({', '.join(names)})")
            if name in bound:
                raise BadCall(f"{self.name}: argument {name!r} given twice")
            bound[name] = value
        for arg in self.signature:
            if arg.name not in bound:
                if not arg.optional:
                    raise BadCall(f"{self.name}: argument {arg.name!r} is missing")
                bound[arg.name] = None
        return {name: bound[name] for name in names}

    def outputs(self) -> tuple[str, ...]:
        return tuple(arg.name for arg in self.signature if arg.kind in ("out", "inout"))


_CARDS: dict[str, OpCard] = {}


def register(card: OpCard) -> OpCard:
    """Adds a card to the catalogue; a name can be registered once."""
    if card.name in _CARDS:
        raise ValueError(f"op card {card.name!r} is registered twice")
    _CARDS[card.name] = card
    return card


def get_card(name: str) -> OpCard:
    """The card of op `name`; BadCall lists near names when there is none."""
    cards = all_cards()
    if name not in cards:
        import difflib

        near = difflib.get_close_matches(name, cards, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise BadCall(f"no op card is named {name!r}{hint}")
    return cards[name]


def all_cards() -> dict[str, OpCard]:
    """Every card by name, importing the catalogue on first use."""
    import deepinfer_hal.ops  # noqa: F401  (importing registers)

    return _CARDS
