"""The provider where Triton is not installed, and the choice of a target."""

from __future__ import annotations

import importlib.util

import pytest
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_triton.provider import triton_kernels, unavailable_reason
from deepinfer_triton.targets import SM90, SM100, SM103, cuda_target


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed here")
def test_without_triton_there_are_no_kernels_and_the_reason_is_a_sentence():
    assert unavailable_reason().startswith("Triton cannot be imported")
    with pytest.raises(BackendUnavailable, match="Triton cannot be imported"):
        triton_kernels(SM90)


def test_a_compute_capability_has_one_target_or_a_sentence():
    assert cuda_target(9, 0) is SM90
    assert cuda_target(10, 0) is SM100 and cuda_target(10, 3) is SM103
    assert "this device has 8.0" in cuda_target(8, 0)
