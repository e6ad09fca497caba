"""Coefficients of many rows on a Hopper GPU: no matrix drives the scales of the divided Sinkhorn out of float32's range."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda import native, native_library
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.ops._common import float64_reference
from deepinfer_hal.weights import prepare_canonical

CARD = get_card("hyper_connection_pre")
ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and native_library.LIBRARY.is_file()


def problem(rows: int, iterations: int, scale: float, device: str, eps: float = 1e-6) -> dict:
    """A call whose logits have a standard deviation of about `scale`."""
    args = CARD.generate(Case("hyper_connection_pre", dict(T=rows, m=4, H=256, dtype="bf16")), 11, device, prepare_canonical)
    return {**args, "hc_eps": eps, "iterations": iterations, "scale": torch.full_like(args["scale"], scale)}


def exact(args: dict) -> torch.Tensor:
    wanted = {**args, **{name: args[name].to(torch.float64) for name in ("out", "pre", "post", "comb")}}
    with float64_reference():
        CARD.reference(*wanted.values())
    return wanted["comb"]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU of compute capability 9.0 and the built kernel library")
@pytest.mark.parametrize(
    ("iterations", "scale", "eps"),
    [
        (20, 1.0, 1e-6), (20, 20.0, 1e-6), (64, 1.0, 1e-6), (64, 60.0, 3e-7), (20, 1.0, 1e-3), (20, 1.0, 1e-9),
        (64, 60.0, 1e-12), (64, 20.0, 1e-30), (20, 1.0, 1.0), (64, 1.0, 3.0),
    ],
)  # fmt: skip
def test_rows_by_the_ten_thousand_have_the_coefficients_of_the_card(iterations, scale, eps):
    """By divisions, and without where eps is one of models (residual_site_sinkhorn.cuh)."""
    args = problem(20_000, iterations, scale, "cuda", eps)
    native.library(torch.device("cuda", 0)).bind(CARD)(*args.values())
    torch.cuda.synchronize()
    comb = args["comb"]
    assert torch.isfinite(comb).all()
    if eps < 0.1:
        torch.testing.assert_close(comb.sum(-2), torch.ones_like(comb[:, 0]), rtol=0, atol=1e-4 + eps)  # columns come last
    if scale == 1.0:
        torch.testing.assert_close(comb.double(), exact(args), rtol=0, atol=1e-4)


def test_the_reference_of_such_a_problem_has_columns_that_add_up_to_one():
    comb = exact(problem(64, 64, 1.0, "cpu"))
    torch.testing.assert_close(comb.sum(-2), torch.ones_like(comb[:, 0]), rtol=0, atol=1e-5)
