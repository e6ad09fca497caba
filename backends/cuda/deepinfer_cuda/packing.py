"""Tensors and weights behind the C ABI, of one GPU alone: an address of another device, or of the host, would stop the GPU."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from deepinfer_hal.c_abi import MAX_DIMS, pack_tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import WeightHandle

from deepinfer_cuda import weights

_TENSOR = struct.Struct("@Piiii10q")
_CODES = {
    torch.float32: 1, torch.bfloat16: 2, torch.uint8: 3, torch.int32: 4, torch.int64: 5, torch.float64: 6,
}  # fmt: skip
_OTHER = 7
_REST = tuple((0,) * (MAX_DIMS - dims) for dims in range(MAX_DIMS + 1))
_ABSENT = pack_tensor(None)


def tensors_of(device: torch.device) -> Callable[[torch.Tensor | None], bytes]:
    """What packs the tensors of calls on `device` as `c_abi.pack_tensor` does, in two thirds of its time. BadCall for one that is
    elsewhere, or whose last dimension has gaps, which no kernel looks for."""
    index = -1 if device.type == "cpu" else device.index or 0
    pack_struct = _TENSOR.pack

    def pack(tensor: torch.Tensor | None) -> bytes:
        if tensor is None:
            return _ABSENT
        shape, strides = tensor.shape, tensor.stride()
        dims = len(shape)
        if tensor.get_device() != index or dims > MAX_DIMS or (dims and strides[-1] != 1 and shape[-1] > 1):
            _refuse(tensor, device)
        rest = _REST[dims]
        code = _CODES.get(tensor.dtype, _OTHER)
        return pack_struct(tensor.data_ptr(), code, 0, index, dims, *shape, *rest, *strides, *rest)

    return pack


def weights_of(device: torch.device) -> Callable[[WeightHandle], tuple[bytes, bytes]]:
    """What packs the weights of calls on `device`. BadCall for one that is elsewhere."""

    def pack(weight: WeightHandle) -> tuple[bytes, bytes]:
        stored = weights.stored_values(weight)
        if stored.device != device:
            raise BadCall(f"weight {weight.role!r} {list(stored.shape)} is on {stored.device}; {_OWN.format(device)}")
        return weights.pack_weight(weight)

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
