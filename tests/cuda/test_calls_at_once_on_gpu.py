"""Calls that run at once on a GPU share no workspace: graphs captured on one stream, a stream and a graph that was captured on
it, threads that call on one stream; and what is left after a capture that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from deepinfer_cuda import native, native_library
from deepinfer_cuda.graphs import CudaGraphs
from deepinfer_hal.errors import BackendError
from deepinfer_hal.formats import quantise, quantise_weight_fp8
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not native_library.LIBRARY.is_file(),
    reason="needs a GPU of compute capability 9.0 and the built kernel library",
)

REPLAYS = 1000


class Linear:
    """A call of linear with its operands and its right result."""

    def __init__(self, rows: int, n: int, k: int, seed: int) -> None:
        gen = torch.Generator("cuda").manual_seed(seed)
        self.x, self.x_scale = quantise(torch.randn(rows, k, generator=gen, device="cuda"), "fp8_32")
        values, scales = quantise_weight_fp8(torch.randn(n, k, generator=gen, device="cuda") * k**-0.5)
        self.weight = WeightHandle("w", CanonicalWeight("fp8_block32", values, scales))
        self.out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        (kernel,) = (one for one in native.kernels((9, 0), torch.device("cuda", 0)) if one.op == "linear")
        self.fn = kernel.fn
        self()
        torch.cuda.synchronize()
        self.wanted = self.out.clone()

    def __call__(self) -> None:
        self.fn(self.x, self.x_scale, self.weight, None, self.out, None)

    def graph(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, stream=stream):
            self()
        return made

    def right(self) -> bool:
        return torch.equal(self.out, self.wanted)

    def right_after(self, run: Callable[[], None]) -> bool:
        """Whether `run`, of this call or of a graph with it, writes the right result."""
        self.out.zero_()
        run()
        torch.cuda.synchronize()
        return self.right()


SIZES = [
    pytest.param(64, 5120, 8192, id="slices that wait for one another in the workspace"),
    pytest.param(300, 1280, 5120, id="expanded rows and sums of slices in the workspace"),
    pytest.param(300, 8192, 1280, id="expanded rows in the workspace"),
]


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
def test_these_calls_write_their_workspace(rows, n, k):
    """Without that the tests below would have no subject."""
    call, stream = Linear(rows, n, k, 1), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        room, _ = native.library(torch.device("cuda", 0)).workspace._made[stream.cuda_stream]
        room.fill_(0x5A)
        call()
        stream.synchronize()
    assert int((room != 0x5A).sum()) > rows * k


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
def test_graphs_captured_on_one_stream_are_replayed_at_once_on_two(rows, n, k):
    calls, stream = [Linear(rows, n, k, seed) for seed in (1, 2)], torch.cuda.Stream()
    graphs = [call.graph(stream) for call in calls]
    streams = [torch.cuda.Stream() for _ in graphs]
    wrong = torch.zeros(2, dtype=torch.int32, device="cuda")
    for _ in range(REPLAYS):
        for graph, there, call, count in zip(graphs, streams, calls, wrong, strict=True):
            with torch.cuda.stream(there):
                graph.replay()
                count += (call.out != call.wanted).any()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
def test_a_graph_is_replayed_beside_calls_of_the_stream_that_it_was_captured_on(rows, n, k):
    captured, eager, stream = Linear(rows, n, k, 1), Linear(rows, n, k, 2), torch.cuda.Stream()
    graph, other = captured.graph(stream), torch.cuda.Stream()
    wrong = torch.zeros(2, dtype=torch.int32, device="cuda")
    for _ in range(REPLAYS):
        with torch.cuda.stream(other):
            graph.replay()
            wrong[0] += (captured.out != captured.wanted).any()
        with torch.cuda.stream(stream):
            eager()
            wrong[1] += (eager.out != eager.wanted).any()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


def test_threads_that_call_on_one_stream_do_not_disturb_each_other():
    calls = [Linear(300, 1280, 5120, seed) for seed in (1, 2)]
    stream, wrong = torch.cuda.Stream(), []

    def many(call: Linear) -> None:
        with torch.cuda.stream(stream):
            for _ in range(REPLAYS):
                call()
                wrong.append((call.out != call.wanted).any())

    threads = [threading.Thread(target=many, args=(call,)) for call in calls]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    torch.cuda.synchronize()
    assert len(wrong) == 2 * REPLAYS and not bool(torch.stack(wrong).any())


def test_graphs_of_one_pool_have_one_workspace_between_them():
    calls, graphs = [Linear(300, 1280, 5120, seed) for seed in range(4)], CudaGraphs(0)
    made = [graphs.capture(call) for call in calls]
    assert graphs.pool_bytes < 2 * native.WORKSPACE_BYTES
    for _ in range(20):
        for graph, call in zip(made, calls, strict=True):
            call.out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert call.right()


def test_a_pool_whose_graphs_are_gone_is_captured_into_again():
    call, graphs = Linear(300, 1280, 5120, 1), CudaGraphs(0)
    other = Linear(64, 5120, 8192, 2)

    def both() -> None:
        call()
        other()

    for step in (both, call, both):
        graph = graphs.capture(step)
        for _ in range(3):
            call.out.zero_()
            other.out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert call.right() and (step is call or other.right())
        del graph
    assert graphs.pool_bytes < 8 * native.WORKSPACE_BYTES


def test_torchs_own_temporaries_in_a_capture_do_not_meet_the_workspace():
    call, graphs = Linear(300, 1280, 5120, 1), CudaGraphs(0)
    kept = [torch.zeros(4 << 20, device="cuda") for _ in range(8)]

    def step() -> None:
        for number, out in enumerate(kept):
            made = torch.full((4 << 20,), float(number), device="cuda")
            call()
            out.copy_(made)

    graph = graphs.capture(step)
    for _ in range(20):
        for out in kept:
            out.fill_(-1)
        call.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert call.right() and all(bool((out == number).all()) for number, out in enumerate(kept))


def test_after_a_capture_that_failed_calls_and_captures_are_right():
    call, stream = Linear(300, 1280, 5120, 1), torch.cuda.Stream()
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        call()
        raise RuntimeError("a step that fails while it is captured")
    call.out.zero_()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    assert call.right()
    graph = call.graph(stream)
    assert call.right_after(graph.replay)


def test_a_step_that_waits_while_it_is_captured_leaves_calls_and_captures_right():
    call, graphs = Linear(300, 1280, 5120, 1), CudaGraphs(0)

    def step() -> None:
        call()
        call.out.sum().item()

    with pytest.raises(RuntimeError):
        graphs.capture(step)
    assert call.right_after(call)
    graph = graphs.capture(call)
    assert call.right_after(graph.replay)


def test_where_no_memory_is_left_for_a_workspace_the_call_says_so_and_a_later_one_is_right():
    call, stream = Linear(300, 1280, 5120, 1), torch.cuda.Stream()
    native.library(torch.device("cuda", 0)).workspace._made.pop(stream.cuda_stream, None)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with torch.cuda.stream(stream), pytest.raises(BackendError, match="256 MiB left for the kernels' workspace"):
            call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    call.out.zero_()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    assert call.right()
