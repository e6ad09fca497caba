"""What of a call's tensors and weights goes behind the C ABI, and what is refused before a kernel reads its address."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from deepinfer_cuda import packing, weights
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


def test_tensors_of_one_form_keep_their_own_addresses():
    pack = tensors_of(CPU)
    rows = torch.zeros(8, 16)
    for tensor in (rows[:4], rows[4:], rows[:4].clone(), rows[:4].view(torch.int32), rows.T[:, :1], rows[:4]):
        assert pack(tensor) == pack_tensor(tensor)


def test_a_known_form_on_another_device_is_refused():
    pack = tensors_of(CPU)
    pack(torch.zeros(2, 3))

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 1)

        def get_device(self):
            return 1

    with pytest.raises(BadCall, match=r"a tensor \[2, 3\] is on cuda:1"):
        pack(torch.zeros(2, 3).as_subclass(Elsewhere))


def test_no_more_forms_than_its_bound_are_remembered(monkeypatch):
    monkeypatch.setattr(packing, "MOST_FORMS", 3)
    pack = tensors_of(CPU)
    forms = next(cell.cell_contents for cell in pack.__closure__ if isinstance(cell.cell_contents, dict))
    for rows in range(10):
        tensor = torch.zeros(rows, 4)
        assert pack(tensor) == pack_tensor(tensor) and len(forms) <= 3


def test_a_weight_is_packed_once_and_not_kept(monkeypatch):
    packed = []
    monkeypatch.setattr(weights, "pack_weight", lambda weight: packed.append(1) or (b"values", b"scales"))
    pack = weights_of(CPU)
    weight = WeightHandle("wq_a", CanonicalWeight("bf16", torch.zeros(4, 8, dtype=torch.bfloat16)))
    assert pack(weight) == pack(weight) == (b"values", b"scales") and len(packed) == 1
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None
