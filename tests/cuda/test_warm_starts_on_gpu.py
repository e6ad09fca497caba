"""Triton kernels that are started warm on a GPU: the bits of Triton's own start, eagerly, in a graph, on another stream."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from deepinfer_triton import warm  # noqa: E402
from deepinfer_triton.ops.rms_norm import rms_norm  # noqa: E402
from deepinfer_triton.targets import SM90  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and warm.KERNEL is None, reason=f"warm starts are not for Triton {triton.__version__}"
)


def rows(first: int, count: int = 5) -> torch.Tensor:
    """bf16 [count, 96] whose first element lies `first` elements behind a multiple of 16 bytes."""
    made = torch.randn(count * 96 + 16, generator=torch.Generator("cuda").manual_seed(count), device="cuda", dtype=torch.bfloat16)
    return made[first : first + count * 96].view(count, 96)


def normed(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    rms_norm(SM90, x, torch.ones(96, device="cuda", dtype=torch.bfloat16), 1e-6, None, out)
    return out


@pytest.fixture
def no_starts_by_triton(monkeypatch):
    """Ends a test that starts a kernel Triton's own way, from when it is called."""

    def refuse(*args, **named):
        raise AssertionError("started Triton's own way")

    return lambda: monkeypatch.setattr(JITFunction, "run", refuse)


@pytest.mark.parametrize("first", [0, 1, 8])
def test_a_warm_start_writes_the_bits_of_tritons_own(first, monkeypatch, no_starts_by_triton):
    monkeypatch.setattr(warm, "KERNEL", None)
    wanted = {count: normed(rows(first, count)) for count in (1, 5, 16)}
    monkeypatch.undo()
    normed(rows(first))
    no_starts_by_triton()
    for count, right in wanted.items():
        assert torch.equal(normed(rows(first, count)), right)


def test_a_warm_start_goes_to_the_current_stream_and_into_its_graph(no_starts_by_triton):
    x, wanted = rows(0), normed(rows(0))
    no_starts_by_triton()
    stream, graph, out = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.zeros_like(x)
    weight = torch.ones(96, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        rms_norm(SM90, x, weight, 1e-6, None, out)
    torch.cuda.synchronize()
    assert not out.any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
