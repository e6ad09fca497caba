"""A chip without a torch device: tensors live in host memory, and each kernel call copies in, calls the C ABI, copies out.

What the chip must offer is a C library with four functions (allocate, free, copy in, copy out) and kernels `di_<op>`. It is
slow by nature, since caches travel with every call; but a port can be correct, and tested by the conformance suite, before
anybody writes a torch integration.

    runtime = CRuntime("libchip.so", malloc="chip_malloc", free="chip_free", copy_in="chip_copy_in", copy_out="chip_copy_out")
    kernels = host_memory_kernels(runtime, "libkernels.so", "mychip")      # Backend.kernels
    handle = DeviceWeight(runtime, role, canonical)                        # Backend.prepare_weight
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_hal.c_abi import CLibrary, pack_tensor
from deepinfer_hal.card import OpCard, get_card
from deepinfer_hal.errors import BackendError, BackendUnavailable
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import CanonicalWeight, WeightHandle


class CRuntime:
    """The chip's four memory functions, by their C names:

    void* malloc(size_t); void free(void*); int copy_in(void* device, const void* host, size_t); int copy_out(void* host,
    const void* device, size_t). A copy returns 0 when it is done, and is done when it returns.
    """

    def __init__(self, library: str | Path, malloc: str, free: str, copy_in: str, copy_out: str) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        try:
            loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            self._malloc, self._free = getattr(loaded, malloc), getattr(loaded, free)
            self._copy_in, self._copy_out = getattr(loaded, copy_in), getattr(loaded, copy_out)
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(f"the chip's runtime {library} cannot be used: {error}") from error
        self._malloc.argtypes, self._malloc.restype = (size,), pointer
        self._free.argtypes, self._free.restype = (pointer,), None
        for copy in (self._copy_in, self._copy_out):
            copy.argtypes, copy.restype = (pointer, pointer, size), ctypes.c_int

    def malloc(self, nbytes: int) -> int:
        """Address of device memory. MemoryError when there is none left."""
        address = self._malloc(max(nbytes, 1))
        if not address:
            raise MemoryError(f"the chip has no room for {nbytes} bytes")
        return address

    def free(self, address: int) -> None:
        self._free(address)

    def copy_in(self, address: int, host: int, nbytes: int) -> None:
        """Bytes from a host address to a device address. BackendError when the chip refuses."""
        _check(self._copy_in(address, host, nbytes), "to", nbytes)

    def copy_out(self, host: int, address: int, nbytes: int) -> None:
        """Bytes from a device address to a host address. BackendError when the chip refuses."""
        _check(self._copy_out(host, address, nbytes), "from", nbytes)


def _check(status: int, direction: str, nbytes: int) -> None:
    if status:
        raise BackendError(f"a copy of {nbytes} bytes {direction} the chip failed with status {status}")


class DeviceWeight(WeightHandle):
    """The checkpoint's bytes on the host, for references, and on the chip once the first kernel asks for them."""

    def __init__(self, runtime: CRuntime, role: str, canonical: CanonicalWeight) -> None:
        kept = (canonical.values, canonical.scales)
        values, scales = (None if part is None else part.contiguous() for part in kept)
        super().__init__(role, CanonicalWeight(canonical.format, values, scales))
        self._runtime = runtime
        self._addresses: tuple[int | None, int | None] | None = None

    @property
    def addresses(self) -> tuple[int | None, int | None]:
        """Where values and scales lie on the chip; freed with the handle."""
        if self._addresses is None:
            kept = self.canonical()
            self._addresses = tuple(self._upload(part) for part in (kept.values, kept.scales))
        return self._addresses

    def _upload(self, part: torch.Tensor | None) -> int | None:
        if part is None:
            return None
        nbytes = part.numel() * part.element_size()
        address = self._runtime.malloc(nbytes)
        weakref.finalize(self, self._runtime.free, address)
        self._runtime.copy_in(address, part.data_ptr(), nbytes)
        return address

    def slot(self, index: int) -> WeightHandle:
        """Handle of one expert, with a chip copy of its own."""
        return DeviceWeight(self._runtime, self.role, super().slot(index).canonical())


@dataclass
class _Span:
    """Host bytes start..stop that one or more arguments share, and whether a call writes into them."""

    start: int
    stop: int
    written: bool
    address: int = 0


def host_memory_kernels(runtime: CRuntime, library: str | Path, provider: str, **statements: Any) -> list[Kernel]:
    """One kernel for each `di_<op>` of a library, on host tensors. `statements`: see CLibrary.kernels."""
    moved = _Moved(runtime, library)
    return [
        Kernel(k.op, k.provider, moved.call(get_card(k.op), k.fn), k.symbol, k.invariant, k.capturable, k.priority, k.supports)
        for k in moved.library.kernels(provider, **statements)
    ]


class _Moved:
    """Calls of a library whose host arguments are on the chip while a call runs."""

    def __init__(self, runtime: CRuntime, library: str | Path) -> None:
        self.runtime = runtime
        self._spans: Sequence[_Span] = ()
        self.library = CLibrary(library, pack=self._pack, pack_weight=self._pack_weight)

    def call(self, card: OpCard, fn: Callable[..., None]) -> Callable[..., None]:
        """`fn` between copies in and copies out."""

        def moved(*values: Any, **named: Any) -> None:
            args = card.bind_args(values, named)
            with self._on_chip(card, args):
                fn(*args.values())

        return moved

    @contextlib.contextmanager
    def _on_chip(self, card: OpCard, args: Mapping[str, Any]) -> Iterator[None]:
        spans = merge_spans(argument_spans(card, args))
        runtime, held = self.runtime, []
        try:
            for span in spans:
                span.address = runtime.malloc(span.stop - span.start)
                held.append(span.address)
                runtime.copy_in(span.address, span.start, span.stop - span.start)
            self._spans = spans
            yield
            for span in spans:
                if span.written:
                    runtime.copy_out(span.start, span.address, span.stop - span.start)
        finally:
            self._spans = ()
            for address in held:
                runtime.free(address)

    def _pack(self, tensor: torch.Tensor | None) -> bytes:
        if tensor is None or not tensor.numel():
            return pack_tensor(tensor, pointer=None if tensor is None else 0)
        host = tensor.data_ptr()
        span = next(one for one in self._spans if one.start <= host < one.stop)
        return pack_tensor(tensor, pointer=span.address + host - span.start)

    def _pack_weight(self, weight: WeightHandle) -> tuple[bytes, bytes]:
        if not isinstance(weight, DeviceWeight):
            raise BackendError(f"weight {weight.role} was not prepared for this chip: prepare_weight must make a DeviceWeight")
        stored, (values, scales) = weight.canonical(), weight.addresses
        return pack_tensor(stored.values, pointer=values, shape=stored.shape), pack_tensor(stored.scales, pointer=scales)


def argument_spans(card: OpCard, args: Mapping[str, Any]) -> Iterator[_Span]:
    """The host bytes from first to last element of each tensor argument."""
    for arg in card.signature:
        value = args[arg.name]
        if arg.is_tensor and value is not None and value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            yield _Span(value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size(), arg.kind != "in")


def merge_spans(spans: Iterable[_Span]) -> list[_Span]:
    """Spans that overlap become one, so that arguments which share memory share it on the chip too."""
    merged: list[_Span] = []
    for span in sorted(spans, key=lambda one: one.start):
        if merged and span.start < merged[-1].stop:
            merged[-1].stop = max(merged[-1].stop, span.stop)
            merged[-1].written |= span.written
        else:
            merged.append(span)
    return merged
