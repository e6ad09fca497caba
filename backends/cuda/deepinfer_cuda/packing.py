"""Tensors and weights behind the C ABI, of one GPU alone: an address of another device, or of the host, would stop the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepinfer_hal.c_abi import pack_tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import WeightHandle

from deepinfer_cuda import weights


def tensors_of(device: torch.device) -> Callable[[torch.Tensor | None], bytes]:
    """What packs the tensors of calls on `device`. BadCall for one that is elsewhere, or whose last dimension has gaps, which no
    kernel looks for."""

    def pack(tensor: torch.Tensor | None) -> bytes:
        if tensor is not None:
            _check_device(tensor, device, "a tensor")
            if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
                shape, strides = list(tensor.shape), list(tensor.stride())
                raise BadCall(f"a tensor {shape} has strides {strides}; its last dimension must be contiguous")
        return pack_tensor(tensor)

    return pack


def weights_of(device: torch.device) -> Callable[[WeightHandle], tuple[bytes, bytes]]:
    """What packs the weights of calls on `device`. BadCall for one that is elsewhere."""

    def pack(weight: WeightHandle) -> tuple[bytes, bytes]:
        _check_device(weights.stored_values(weight), device, f"weight {weight.role!r}")
        return weights.pack_weight(weight)

    return pack


def _check_device(tensor: torch.Tensor, device: torch.device, what: str) -> None:
    if tensor.device != device:
        raise BadCall(f"{what} {list(tensor.shape)} is on {tensor.device}; the kernels of {device} read its own memory alone")
