"""One case on one kernel: its arguments, the float64 result, what must stay untouched, and a way to run it.

Checks ask a Problem for variants: `run(args)` runs the kernel on host arguments placed in guarded memory and reads
everything back; `reference(args)` gives the float64 result of the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer_hal.backend import Backend
from deepinfer_hal.card import Case, OpCard
from deepinfer_hal.communicator import Communicator, SingleRank, World
from deepinfer_hal.conformance import rows
from deepinfer_hal.conformance.arena import Placed, bits, clone, place
from deepinfer_hal.conformance.verdict import CheckFailed, Declined
from deepinfer_hal.errors import Unsupported
from deepinfer_hal.kernel import CallSpec, Kernel
from deepinfer_hal.ops._common import float64_reference
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, prepare_canonical

Args = Mapping[str, Any]

DEVICE_REFERENCE_FLOPS, DEVICE_REFERENCE_BYTES = 1e8, 4 << 20
"""From this on a case's reference is computed on the device, where it may be: smaller ones are over sooner on the host."""


@dataclass(frozen=True)
class Subject:
    """What is tested: a kernel of a card, with the backend whose device and weight layouts it takes.

    Without a backend: host memory and the checkpoint's own weight layout. `part(op)` gives the kernel of another op of
    the same backend, for composites; None means the reference.
    """

    card: OpCard
    kernel: Kernel
    backend: Backend | None = None
    index: int = 0
    parts: Mapping[str, Kernel] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.backend is None else self.backend.device(self.index)

    def prepare(self, role: str, canonical: CanonicalWeight) -> WeightHandle:
        """The backend's layout of a host weight."""
        if self.backend is None:
            return prepare_canonical(role, canonical)
        scales = None if canonical.scales is None else canonical.scales.to(self.device)
        moved = CanonicalWeight(canonical.format, canonical.values.to(self.device), scales)
        return self.backend.prepare_weight(self.index, role, moved)

    @functools.cached_property
    def communicator(self) -> Communicator:
        """The backend's own communicator of one rank."""
        kind = None if self.backend is None else self.backend.communicator(self.index)
        return SingleRank() if kind is None else kind.open(World(0, 1), self.device)

    @functools.cached_property
    def graphs(self) -> Any:
        """The backend's graphs slot, or None where it does not offer graphs."""
        offered = self.backend is not None and self.backend.capabilities(self.index).graphs
        return self.backend.graphs(self.index) if offered else None

    def synchronize(self) -> None:
        if self.backend is not None:
            self.backend.synchronize(self.index)

    def part(self, op: str) -> Callable[..., None]:
        from deepinfer_hal.card import get_card

        kernel = self.parts.get(op)
        return get_card(op).reference if kernel is None else kernel.fn


@dataclass
class Ran:
    """Host copies after a run: arguments, and the memory they lay in."""

    args: dict[str, Any]
    placed: Placed
    images: list[torch.Tensor]


class Problem:
    """A case on a subject. `first` marks the op's first case with rows: checks that are needed once an op run there.
    `drawn`: the arguments are the card's own for the seed, not a recording."""

    def __init__(
        self, subject: Subject, case: Case, seed: int = 0, *, first: bool = True, pristine: Args | None = None
    ) -> None:
        self.subject, self.case, self.seed, self.first = subject, case, seed, first
        self.card, self.kernel, self.drawn = subject.card, subject.kernel, pristine is None
        made = self.card.generate(case, seed, "cpu", prepare_canonical) if pristine is None else pristine
        self.pristine = clone({name: made[name] for name in self.card.arg_names})
        self.statistics: dict[str, dict[str, Any]] = {"used": {}, "histogram": {}, "flips": {}, "boundary_hits": {}}
        self._weights: dict[int, tuple[Any, WeightHandle]] = {}
        self._canonical: dict[int, tuple[Any, WeightHandle]] = {}

    # -- facts

    @property
    def num_rows(self) -> int:
        """Rows of the row list, valid or not."""
        return rows.num_rows(self.card, self.pristine)

    @property
    def valid_rows(self) -> int:
        return rows.valid_rows(self.card, self.pristine)

    @property
    def empty(self) -> bool:
        """Nothing to do: checks other than `empty` leave such a case alone."""
        return self.valid_rows == 0

    @functools.cached_property
    def spec(self) -> CallSpec:
        """What is static of this call, as a bound op would know it."""
        from deepinfer_hal.statics import call_spec

        return call_spec(self.card, self.pristine, batch_invariant=self.kernel.invariant == "yes")

    @functools.cached_property
    def expected(self) -> dict[str, Any]:
        """Host arguments after the float64 reference."""
        return self.reference(self.pristine)

    @functools.cached_property
    def written(self) -> dict[str, torch.Tensor]:
        """output -> bool of its shape: elements that the op writes.

        An element is written when the reference leaves something other than what was there, for one of two contents.
        """
        other = self.refilled(self.pristine)
        after = self.reference(other)
        return {
            name: (bits(self.expected[name]) != bits(self.pristine[name])) | (bits(after[name]) != bits(other[name]))
            for name in self.outputs
        }

    @functools.cached_property
    def base(self) -> dict[str, Any]:
        """Host arguments after the kernel ran on the case as it is."""
        return self.run().args

    @property
    def outputs(self) -> list[str]:
        """Output tensors of this call, `out` and `inout`, given and not None."""
        return [name for name in self.card.outputs() if self.pristine[name] is not None]

    @functools.cached_property
    def read_too(self) -> frozenset[str]:
        """Outputs whose earlier content the op reads: float `inout`, and arguments that share memory with inputs."""
        kinds = {arg.name: (arg.kind, arg.dtype) for arg in self.card.signature}
        inputs = {
            _storage(self.pristine[n]) for n, (kind, _) in kinds.items() if kind == "in" and _is_tensor(self.pristine[n])
        }
        return frozenset(
            name
            for name in self.outputs
            if (kinds[name][0] == "inout" and self.pristine[name].is_floating_point())
            or (self.pristine[name].numel() and _storage(self.pristine[name]) in inputs)
        )

    # -- variants

    def refilled(self, args: Args) -> dict[str, Any]:
        """The same call with another content in the outputs that are only written: complemented bytes, or 1234.5."""
        other = clone(args)
        for name in self.outputs:
            if name in self.read_too:
                continue
            if other[name].is_floating_point():
                other[name].fill_(1234.5)
            else:
                other[name].copy_(~other[name])
        return other

    def reference(self, args: Args) -> dict[str, Any]:
        """Host arguments after the reference computed in float64 on a copy of `args`: on the host, or where that would
        take long and the subject's device can compute float64, there."""
        if not self._reference_on_device:
            copied = clone(args)
            with float64_reference():
                self.card.reference(*copied.values())
            return copied
        placed = place(args, self.subject.device, guard=0)
        for arg in self.card.signature:
            if arg.kind == "weight" and placed.args[arg.name] is not None:
                placed.args[arg.name] = self._canonical_there(placed.args[arg.name])
        with float64_reference():
            self.card.reference(*placed.args.values())
        return {**args, **{name: value for name, value in placed.read()[0].items() if isinstance(value, torch.Tensor)}}

    @functools.cached_property
    def _reference_on_device(self) -> bool:
        """Whether the case is large, by its card, and the device is an accelerator with float64."""
        device = self.subject.device
        if device.type == "cpu" or self.subject.backend is None:
            return False
        cost = self.card.cost(self.pristine)
        large = cost.flops >= DEVICE_REFERENCE_FLOPS or cost.bytes >= DEVICE_REFERENCE_BYTES
        return large and self.subject.backend.capabilities(self.subject.index).float64

    def _canonical_there(self, handle: WeightHandle) -> WeightHandle:
        """A host weight in the checkpoint's layout on the device, copied once."""
        if id(handle) not in self._canonical:
            own, device = handle.canonical(), self.subject.device
            scales = None if own.scales is None else own.scales.to(device)
            moved = CanonicalWeight(own.format, own.values.to(device), scales)
            self._canonical[id(handle)] = (handle, prepare_canonical(handle.role, moved))
        return self._canonical[id(handle)][1]

    def weight(self, handle: WeightHandle) -> WeightHandle:
        """The backend's handle of a canonical host weight, prepared once."""
        if id(handle) not in self._weights:
            own = handle.canonical()
            scales = None if own.scales is None else own.scales.clone()
            copied = CanonicalWeight(own.format, own.values.clone(), scales)  # a kernel that writes it is then seen
            self._weights[id(handle)] = (handle, self.subject.prepare(handle.role, copied))
        return self._weights[id(handle)][1]

    def another_weight(self, handle: WeightHandle) -> WeightHandle:
        """The backend's handle of the same host weight in memory of its own."""
        stored = self._canonical_there(handle).canonical()
        scales = None if stored.scales is None else stored.scales.clone()
        return self.subject.prepare(handle.role, CanonicalWeight(stored.format, stored.values.clone(), scales))

    def place(self, args: Args | None = None, **placing: Any) -> Placed:
        """Host arguments on the device, with the backend's weights and its communicator."""
        placed = place(self.pristine if args is None else args, self.subject.device, **placing)
        for arg in self.card.signature:
            if arg.kind == "weight" and placed.args[arg.name] is not None:
                placed.args[arg.name] = self.weight(placed.args[arg.name])
            elif arg.kind == "comm":
                placed.args[arg.name] = self.subject.communicator
        return placed

    def call(self, args: Args, wait: bool = True) -> None:
        """Runs the kernel on device arguments and waits. Declined if it raises Unsupported, CheckFailed otherwise."""
        try:
            self.kernel.fn(*args.values())
            if wait:
                self.subject.synchronize()
        except Unsupported as error:
            raise Declined(str(error)) from error
        except Exception as error:
            raise CheckFailed(f"the kernel raised {type(error).__name__}: {error}") from error

    def run(self, args: Args | None = None, **placing: Any) -> Ran:
        """Places, runs, reads back."""
        placed = self.place(args, **placing)
        self.call(placed.args)
        return Ran(*_read(placed))


def _read(placed: Placed) -> tuple[dict[str, Any], Placed, list[torch.Tensor]]:
    values, images = placed.read()
    return values, placed, images


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
