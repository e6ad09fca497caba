"""Binds a shared library of kernels (the C ABI of hal/include/deepinfer/hal.h) with nothing but ctypes.

`CLibrary(path).kernels(provider)` gives one Kernel for each op card whose `di_<op>` symbol the library exports; what a
call passes is made from the card's signature alone, and what a signature decides is decided when an op is bound. Marshalling
takes five to ten microseconds a call: enough for a first port; a backend in a hurry binds the same symbols with a compiled
module.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepinfer_hal.card import OpCard, all_cards
from deepinfer_hal.errors import BackendError, BackendUnavailable, BadCall, Unsupported
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes
from deepinfer_hal.weights import WeightHandle

MAX_DIMS = 5

STRING_CODES: Mapping[str, int] = {"fp8_32": 1, "fp4_16": 2, "mxfp4_32": 3, "f32": 4, "bf16": 5, "coupled": 1, "rejection": 2}
"""di_format and di_rule: what a string argument becomes."""

_DTYPES = {
    torch.float32: 1, torch.bfloat16: 2, torch.uint8: 3, torch.int32: 4, torch.int64: 5, torch.float64: 6,
}  # fmt: skip
_OTHER = 7
_TENSOR = struct.Struct("@Piiii10q")
_ABSENT = _TENSOR.pack(0, 0, 0, -1, 0, *[0] * 10)
_ERRORS = {1: BadCall, 2: Unsupported}
_MESSAGE_BYTES = 256


_Call = Callable[[Sequence[bytes], Sequence[int], Sequence[float]], None]


class _Params(ctypes.Structure):
    _fields_ = (("i", ctypes.c_void_p), ("d", ctypes.c_void_p), ("n_i", ctypes.c_int32), ("n_d", ctypes.c_int32))


class _Passed(threading.local):
    """What the calls of one symbol pass by address, made once for each thread: integers, reals and room for a message. A library
    reads and writes it before it returns, and must not call the same symbol from within."""

    def __init__(self) -> None:
        self.counts: tuple[int, int] | None = None
        self.message = ctypes.create_string_buffer(_MESSAGE_BYTES)

    def params(self, integers: Sequence[int], numbers: Sequence[float]) -> Any:
        """A reference to a di_params that holds them until the thread's next call."""
        counts = len(integers), len(numbers)
        if counts != self.counts:
            self._scalars = struct.Struct(f"@{counts[0]}q{counts[1]}d")
            self._held = ctypes.create_string_buffer(max(self._scalars.size, 1))
            address = ctypes.addressof(self._held)
            self._reference = ctypes.byref(_Params(address, address + 8 * counts[0], *counts))
            self.counts = counts
        self._scalars.pack_into(self._held, 0, *integers, *numbers)
        return self._reference


def include_dir() -> Path:
    """The folder to give a compiler, so that `#include "deepinfer/hal.h"` is found. BackendUnavailable if it is absent."""
    package = Path(__file__).resolve().parent
    for folder in (package / "include", package.parent / "include"):
        if (folder / "deepinfer" / "hal.h").is_file():
            return folder
    raise BackendUnavailable(f"deepinfer/hal.h is neither in {package / 'include'} nor in {package.parent / 'include'}")


def pack_tensor(
    tensor: torch.Tensor | None, pointer: int | None = None, shape: tuple[int, ...] | None = None, layout: int = 0
) -> bytes:
    """The di_tensor of a tensor; `pointer` and `shape` replace its own (a copy elsewhere, a weight's logical shape), and
    `layout` is a di_layout: where it is not 0, it alone says how the bytes lie."""
    if tensor is None:
        return _ABSENT
    sizes = tuple(tensor.shape if shape is None else shape)
    dims = len(sizes)
    strides = tensor.stride() if layout == 0 else (0,) * dims
    if dims > MAX_DIMS:
        raise BadCall(f"a tensor of {dims} dimensions cannot pass the C ABI, which takes at most {MAX_DIMS}")
    rest = (0,) * (MAX_DIMS - dims)
    index = -1 if tensor.device.type == "cpu" and pointer is None else tensor.device.index or 0
    return _TENSOR.pack(
        tensor.data_ptr() if pointer is None else pointer, _DTYPES.get(tensor.dtype, _OTHER), layout, index, dims,
        *sizes, *rest, *strides, *rest,
    )  # fmt: skip


def pack_weight(weight: WeightHandle) -> tuple[bytes, bytes]:
    """Values and scales of a handle that keeps the checkpoint's bytes; the values carry the logical shape."""
    stored = weight.canonical()
    return pack_tensor(stored.values, shape=stored.shape), pack_tensor(stored.scales)


class CLibrary:
    """A loaded library. `stream` is the pointer that every call passes on (None: NULL), or gives it for each call.

    workspace: pointer and bytes that every call may use, or what gives them for the call's stream: calls on one stream are in
    order, so one is enough for it.
    pack, pack_weight: how a tensor and a weight handle become di_tensor bytes; another backend may put its own here.
    """

    def __init__(
        self,
        path: str | Path,
        stream: int | Callable[[], int] | None = None,
        pack: Callable[[torch.Tensor | None], bytes] = pack_tensor,
        pack_weight: Callable[[WeightHandle], tuple[bytes, bytes]] = pack_weight,
        workspace: tuple[int, int] | Callable[[int | None], tuple[int, int]] = (0, 0),
    ) -> None:
        self.path, self.stream, self.pack, self.pack_weight = Path(path), stream, pack, pack_weight
        self.workspace = workspace
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendUnavailable(f"the kernel library {path} cannot be loaded: {error}") from error

    def ops(self) -> list[str]:
        """Op cards whose symbol the library exports."""
        return [op for op in sorted(all_cards()) if hasattr(self._library, f"di_{op}")]

    def kernels(
        self,
        provider: str,
        *,
        invariant: str = "unknown",
        capturable: bool = False,
        priority: int = 100,
        supports: Callable[[CallSpec], Yes | No] = lambda call: Yes(),
    ) -> list[Kernel]:
        """One Kernel for each of `ops()`; the statements hold for all of them."""
        cards = all_cards()
        return [
            Kernel(op, provider, self.bind(cards[op]), f"di_{op}", invariant, capturable, priority, supports) for op in self.ops()
        ]

    def bind(self, card: OpCard) -> Callable[..., None]:
        """The call of one op, taking the card's arguments in order."""
        call, count = self.function(card.name), len(card.signature)
        kinds = ["tensor" if arg.is_tensor else arg.kind for arg in card.signature]
        packers = {"tensor": self.pack, "weight": self._weight_bytes}
        tensors = [(place, packers[kind]) for place, kind in enumerate(kinds) if kind in packers]
        numbers = [place for place, kind in enumerate(kinds) if kind == "float"]
        integers = [
            (place, functools.partial(_string_code, card, place) if kind == "str" else int)
            for place, kind in enumerate(kinds)
            if kind not in (*packers, "float")
        ]
        has_comm = "comm" in kinds

        def bound(*values: Any, **named: Any) -> None:
            if len(values) != count or named:
                values = tuple(card.bind_args(values, named).values())
            if has_comm:
                raise Unsupported(f"{card.name}: a communicator has no form in the C ABI; offer this op from Python")
            call(
                [pack(values[place]) for place, pack in tensors],
                [whole(values[place]) for place, whole in integers],
                [float(values[place]) for place in numbers],
            )

        return bound

    def _weight_bytes(self, weight: WeightHandle) -> bytes:
        return b"".join(self.pack_weight(weight))

    def function(self, name: str) -> _Call:
        """`di_<name>`, taking packed tensors, integers and reals. Raises the typed error of a status that is not DI_OK."""
        symbol = getattr(self._library, f"di_{name}")
        symbol.restype = ctypes.c_int
        symbol.argtypes = (
            ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p,
        )  # fmt: skip
        stream_of, room_of, passed = _given(self.stream), _given(self.workspace), _Passed()

        def call(tensors: Sequence[bytes], integers: Sequence[int], numbers: Sequence[float]) -> None:
            packed, message = b"".join(tensors), passed.message
            stream = stream_of()
            address, nbytes = room_of(stream)
            params = passed.params(integers, numbers)
            status = symbol(packed, len(packed) // _TENSOR.size, params, stream, address, nbytes, message)
            if message[0] != b"\0":  # also what a call wrote that succeeded is no later one's reason
                passed.message = ctypes.create_string_buffer(_MESSAGE_BYTES)
            if status:
                text = message.value.decode(errors="replace") or f"status {status}"
                raise _ERRORS.get(status, BackendError)(f"{name}: {text}")

        return call


def _given(value: Any) -> Callable[..., Any]:
    """`value`, if it is to be called for each call, or what gives it."""
    return value if callable(value) else lambda *_: value


def _string_code(card: OpCard, place: int, value: str) -> int:
    if value not in STRING_CODES:
        raise BadCall(f"{card.name}: {card.arg_names[place]} is {value!r}; known: {', '.join(STRING_CODES)}")
    return STRING_CODES[value]
