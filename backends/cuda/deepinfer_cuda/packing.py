"""Tensors and weights behind the C ABI, of one GPU alone: an address of another device, or of the host, would stop the GPU."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable

import torch
from deepinfer_hal.c_abi import MAX_DIMS, pack_tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import WeightHandle

from deepinfer_cuda import weights

_ADDRESS = struct.Struct("@P")
_ABSENT = pack_tensor(None)
MOST_FORMS = 4096
"""Forms of tensors that are remembered; numbers of rows that change from step to step would add to them without end."""


def tensors_of(device: torch.device) -> Callable[[torch.Tensor | None], bytes]:
    """What packs the tensors of calls on `device` as `c_abi.pack_tensor` does, in half its time: all but the address is made once
    for each shape. BadCall for one that is elsewhere, or whose last dimension has gaps, which no kernel looks for."""
    index = -1 if device.type == "cpu" else device.index or 0
    address, forms = _ADDRESS.pack, {}

    def pack(tensor: torch.Tensor | None) -> bytes:
        if tensor is None:
            return _ABSENT
        kind = tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()
        form = forms.get(kind)
        if form is None:
            if len(forms) >= MOST_FORMS:
                forms.clear()
            form = forms[kind] = _form(tensor, device, index)
        return address(tensor.data_ptr()) + form

    return pack


def _form(tensor: torch.Tensor, device: torch.device, index: int) -> bytes:
    """A tensor as it is packed, without its address."""
    shape, strides = tensor.shape, tensor.stride()
    if tensor.get_device() != index or len(shape) > MAX_DIMS or (shape and strides[-1] != 1 and shape[-1] > 1):
        _refuse(tensor, device)
    return pack_tensor(tensor)[_ADDRESS.size :]


def weights_of(device: torch.device) -> Callable[[WeightHandle], tuple[bytes, bytes]]:
    """What packs the weights of calls on `device`, each once: a handle's bytes stay where they were prepared. BadCall for one
    that is elsewhere."""
    packed: weakref.WeakKeyDictionary[WeightHandle, tuple[bytes, bytes]] = weakref.WeakKeyDictionary()

    def pack(weight: WeightHandle) -> tuple[bytes, bytes]:
        known = packed.get(weight)
        if known is None:
            stored = weights.stored_values(weight)
            if stored.device != device:
                raise BadCall(f"weight {weight.role!r} {list(stored.shape)} is on {stored.device}; {_OWN.format(device)}")
            known = packed[weight] = weights.pack_weight(weight)
        return known

    return pack


_OWN = "the kernels of {} read its own memory alone"


def _refuse(tensor: torch.Tensor, device: torch.device) -> None:
    shape, strides = list(tensor.shape), list(tensor.stride())
    if tensor.device != device:
        raise BadCall(f"a tensor {shape} is on {tensor.device}; {_OWN.format(device)}")
    if len(shape) > MAX_DIMS:
        raise BadCall(f"a tensor of {len(shape)} dimensions cannot pass the C ABI, which takes at most {MAX_DIMS}")
    if tensor.numel():
        raise BadCall(f"a tensor {shape} has strides {strides}; its last dimension must be contiguous")
