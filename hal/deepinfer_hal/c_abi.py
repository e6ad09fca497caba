"""Binds a shared library of kernels (the C ABI of hal/include/deepinfer/hal.h) with nothing but ctypes.

`CLibrary(path).kernels(provider)` gives one Kernel for each op card whose `di_<op>` symbol the library exports; what a
call passes is made from the card's signature alone. Marshalling takes some ten microseconds a call: enough for a first
port; a backend in a hurry binds the same symbols with a compiled module.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class _Params(ctypes.Structure):
    _fields_ = (("i", ctypes.c_char_p), ("d", ctypes.c_char_p), ("n_i", ctypes.c_int32), ("n_d", ctypes.c_int32))


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
        call, pack_args, count = self.function(card.name), self._packer(card), len(card.signature)

        def bound(*values: Any, **named: Any) -> None:
            whole = len(values) == count and not named
            call(*pack_args(values if whole else card.bind_args(values, named).values()))

        return bound

    def function(self, name: str) -> Callable[[Sequence[bytes], Sequence[int], Sequence[float]], None]:
        """`di_<name>`, taking packed tensors, integers and reals. Raises the typed error of a status that is not DI_OK."""
        symbol = getattr(self._library, f"di_{name}")
        symbol.restype = ctypes.c_int
        symbol.argtypes = (
            ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(_Params), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
            ctypes.c_char_p,
        )  # fmt: skip

        def call(tensors: Sequence[bytes], integers: Sequence[int], numbers: Sequence[float]) -> None:
            params = _Params(
                struct.pack(f"@{len(integers)}q", *integers), struct.pack(f"@{len(numbers)}d", *numbers), len(integers),
                len(numbers),
            )  # fmt: skip
            message = ctypes.create_string_buffer(_MESSAGE_BYTES)
            stream = self.stream() if callable(self.stream) else self.stream
            room = self.workspace(stream) if callable(self.workspace) else self.workspace
            status = symbol(b"".join(tensors), len(tensors), ctypes.byref(params), stream, *room, message)
            if status:
                text = message.value.decode(errors="replace") or f"status {status}"
                raise _ERRORS.get(status, BackendError)(f"{name}: {text}")

        return call

    def _packer(self, card: OpCard) -> Callable[[Iterable[Any]], tuple[list[bytes], list[int], list[float]]]:
        """What packs a call's arguments, given in order: what depends on the card alone is decided once."""
        kinds = tuple("tensor" if arg.is_tensor else arg.kind for arg in card.signature)
        pack, pack_weight = self.pack, self.pack_weight

        def pack_args(values: Iterable[Any]) -> tuple[list[bytes], list[int], list[float]]:
            tensors: list[bytes] = []
            integers: list[int] = []
            numbers: list[float] = []
            for at, (kind, value) in enumerate(zip(kinds, values, strict=True)):
                if kind == "tensor":
                    tensors.append(pack(value))
                elif kind == "weight":
                    tensors += pack_weight(value)
                elif kind == "float":
                    numbers.append(float(value))
                elif kind == "comm":
                    raise Unsupported(f"{card.name}: a communicator has no form in the C ABI; offer this op from Python")
                elif kind == "str":
                    integers.append(_string_code(card, at, value))
                else:
                    integers.append(int(value))
            return tensors, integers, numbers

        return pack_args


def _string_code(card: OpCard, place: int, value: str) -> int:
    if value not in STRING_CODES:
        raise BadCall(f"{card.name}: {card.arg_names[place]} is {value!r}; known: {', '.join(STRING_CODES)}")
    return STRING_CODES[value]
