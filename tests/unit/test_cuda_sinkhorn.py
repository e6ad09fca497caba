"""The Sinkhorn of residual_site in CUDA C++ without a GPU. Its source, compiled for the host, gives what the card's divisions
give, with any eps. What an eps of models has is made again here: turns without division and without the terms of eps stay in
float's range."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SEED, EPS, LEAST = 20261130, 1e-6, 2.0**-22
"""EPS: the released model's, and the largest for which kernels_cuda/residual_site_sinkhorn.cuh leaves the terms out; LEAST: the
smallest."""

BIAS = 0x4F600000 + 0x00400000


def power_of_ratio(over: torch.Tensor, under: torch.Tensor) -> torch.Tensor:
    """The kernel's power of two near over^(3/4) / under, by the bits of float32."""
    bits = over.view(torch.int32).long()
    return ((bits - (bits >> 2) + BIAS - under.view(torch.int32).long()) & 0x7F800000).to(torch.int32).view(torch.float32)


def of_others(values: torch.Tensor) -> torch.Tensor:
    """[n, 4] -> for each the product of the other three."""
    first, second, third, fourth = values.unbind(-1)
    low, high = first * second, third * fourth
    return torch.stack([second * high, first * high, fourth * low, third * low], -1)


def matrices(n: int, eps: float) -> torch.Tensor:
    """[n, 4, 4] of softmax + eps: logits from nearly equal to far apart, and such as leave a column or a row next to nothing."""
    g = torch.Generator().manual_seed(SEED)
    logits = torch.randn(n, 4, 4, generator=g) * torch.tensor([0.3, 1.0, 8.0, 40.0, 200.0]).repeat(n)[:n, None, None]
    logits[::7, :, 2] += 60.0
    logits[3::11] = torch.where(logits[3::11] > 0, 0.0, -100.0)
    return torch.softmax(logits, -1) + eps


def turned(k: torch.Tensor, eps: float, iterations: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the result of turns_without_eps and the last columns, everything positive that was computed on the way)."""
    seen, sums, product = [], k.sum(-2) + eps, torch.ones(len(k))
    rows = torch.ones(len(k), 4)
    for _ in range(iterations - 1):
        columns, of_all = of_others(sums), sums[:, 0] * sums[:, 1] * (sums[:, 2] * sums[:, 3])
        scale = power_of_ratio(product, of_all)
        plain = (k * columns[:, None]).sum(-1)
        of_rows = plain * scale[:, None]
        rows, product = of_others(of_rows), of_rows[:, 0] * of_rows[:, 1] * (of_rows[:, 2] * of_rows[:, 3])
        sums = (k * rows[:, :, None]).sum(-2)
        seen += [columns, of_all, scale, plain, of_rows, rows, product, sums]
    last = 1.0 + eps if iterations > 1 else 1.0
    return k * rows[:, :, None] / (sums * last)[:, None], seen


def divided(k: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    k = k.double()
    for iteration in range(iterations):
        if iteration > 0:
            k = k / (k.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-2, keepdim=True) + eps)
    return k


@pytest.mark.parametrize(("eps", "iterations"), [(EPS, 1), (EPS, 2), (EPS, 20), (LEAST, 64)])
def test_turns_without_division_give_the_cards_coefficients(eps, iterations):
    k = matrices(20_000, eps)
    got, _ = turned(k, eps, iterations)
    torch.testing.assert_close(got.double(), divided(k, eps, iterations), rtol=0, atol=4e-6)


@pytest.mark.parametrize("eps", [EPS, LEAST])
def test_nothing_leaves_the_range_of_normal_floats_however_many_turns_there_are(eps):
    _, seen = turned(matrices(20_000, eps), eps, 100)
    assert all(bool(((values > 2.0**-126) & (values < 2.0**126)).all()) for values in seen)
    products = torch.stack(seen[6::8])
    assert 2.0**-9 < float(products.min()) and float(products.max()) < 2.0**3


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(matrices, eps, iterations) -> what the kernels' own source makes of them on the host."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    program, source = tmp_path_factory.mktemp("sinkhorn") / "check", ROOT / "tests/cuda/sinkhorn_check.cpp"
    options = ["-O1", "-std=c++17", "-ffp-contract=off", "-I", str(ROOT / "kernels_cuda")]
    subprocess.run(["c++", *options, str(source), "-o", str(program)], check=True)

    def run(k: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
        call = [str(program), repr(eps), str(iterations)]
        made = subprocess.run(call, input=k.numpy().tobytes(), capture_output=True, check=True).stdout
        return torch.frombuffer(bytearray(made), dtype=torch.float32).view(k.shape)

    return run


@pytest.mark.parametrize("iterations", [0, 1, 2, 20, 64])
@pytest.mark.parametrize("eps", [1e-30, 1e-12, 1e-9, 2e-8, LEAST, 5e-7, EPS, 1.1e-6, 1e-3, 0.5, 1.0, 3.0])
def test_the_compiled_source_gives_the_cards_coefficients_with_any_eps(compiled, eps, iterations):
    k = matrices(4_000, eps)
    got = compiled(k, eps, iterations)
    assert bool(torch.isfinite(got).all())
    torch.testing.assert_close(got.double(), divided(k, eps, iterations), rtol=0, atol=4e-6 * max(1.0, eps))
