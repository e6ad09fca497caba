"""What of a call's tensors and weights goes behind the C ABI, and what is refused before a kernel reads its address."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda.packing import tensors_of, weights_of
from deepinfer_hal.c_abi import pack_tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        None,
        torch.zeros(3, 4),
        torch.zeros(3, 8)[:, 2:6],
        torch.zeros(2, 3, 4, 5, 6, dtype=torch.bfloat16),
        torch.zeros(0, 7, dtype=torch.int32),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(5, dtype=torch.uint8),
        torch.zeros(5, dtype=torch.float64),
        torch.zeros(5, dtype=torch.int16),
        torch.zeros(4, 3).T[:, :1],
        torch.zeros(0, 4).T,
        torch.zeros(3, 1).expand(3, 4)[:, :1],
    ],
)
def test_a_tensor_is_packed_as_the_hal_packs_it(tensor):
    assert tensors_of(CPU)(tensor) == pack_tensor(tensor)


def test_a_tensor_or_weight_of_another_device_is_refused():
    gpu = torch.device("cuda", 0)
    with pytest.raises(BadCall, match=r"a tensor \[2, 3\] is on cpu; the kernels of cuda:0 read its own memory alone"):
        tensors_of(gpu)(torch.zeros(2, 3))
    weight = WeightHandle("wq_a", CanonicalWeight("bf16", torch.zeros(4, 8, dtype=torch.bfloat16)))
    with pytest.raises(BadCall, match=r"weight 'wq_a' \[4, 8\] is on cpu; the kernels of cuda:0"):
        weights_of(gpu)(weight)
    assert weights_of(CPU)(weight)[0] == pack_tensor(weight.canonical().values)


def test_a_tensor_whose_last_dimension_has_gaps_is_refused():
    with pytest.raises(BadCall, match=r"a tensor \[4, 3\] has strides \[1, 4\]"):
        tensors_of(CPU)(torch.zeros(3, 4).T)
    with pytest.raises(BadCall, match="its last dimension must be contiguous"):
        tensors_of(CPU)(torch.zeros(3, 1).expand(3, 4))


def test_a_tensor_of_six_dimensions_is_refused():
    with pytest.raises(BadCall, match="a tensor of 6 dimensions cannot pass the C ABI"):
        tensors_of(CPU)(torch.zeros(1, 1, 1, 1, 1, 1))
