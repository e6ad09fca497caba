"""The CUDA backend without a GPU: what is missing is named, the slots over a stand-in for torch.cuda, errors in words."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepinfer_cuda import error_words, gpu, kernels, native, native_library, nccl, peer_memory, runtime
from deepinfer_cuda.backend import CudaBackend
from deepinfer_hal import event_time
from deepinfer_hal.communicator import World
from deepinfer_hal.conformance.communication import communication_cases
from deepinfer_hal.conformance.device_cases import device_cases
from deepinfer_hal.errors import BackendUnavailable, BadCall, CommunicatorError, CommunicatorTimeout, Unsupported
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.reference_communicator import ReferenceCommunicator
from deepinfer_hal.registry import backend_names, list_backends
from deepinfer_hal.weights import CanonicalWeight
from deepinfer_triton.ranks.windows import Windows, open_windows, windows_of

from tests.unit.cuda_on_host import CudaOnHost, Event, FileMemory, NcclOnHost, stand_in

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_library(monkeypatch, tmp_path):
    """Whether the CUDA C++ kernels were built here makes no difference to these tests."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "absent.so")
    monkeypatch.setattr(native_library.part, "__defaults__", (tmp_path / "absent.so",))


@pytest.fixture
def calls(monkeypatch):
    """The stand-in is torch.cuda during the test; what it was called with."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", None, raising=False)
    return stand_in(monkeypatch.setattr)


def names(calls) -> list[str]:
    return [call.name for call in calls]


# ---------------------------------------------------------------------------------------- what is there


def test_finding_the_backend_asks_nothing_of_cuda_and_imports_no_triton():
    code = (
        "import sys, torch; from deepinfer_hal.registry import load_backend; load_backend('cuda'); "
        "sys.exit('triton' in sys.modules or torch.cuda.is_initialized())"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    for path in (ROOT / "backends/cuda/deepinfer_cuda").glob("*.py"):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        imported = [alias.name for node in top if isinstance(node, ast.Import) for alias in node.names]
        assert "triton" not in imported, path.name


def test_it_is_found_before_the_cpu():
    assert "cuda" in backend_names() and backend_names()[-1] == "cpu"


def test_a_torch_without_cuda_is_named_with_its_version_and_so_is_a_missing_triton(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(gpu, "triton_version", lambda: None)
    told = (
        r"torch: wanted a build with CUDA, found 2\.13\.0\+cpu, built without CUDA\); "
        r".*Triton: wanted 3\.6 or later, found none"
        r".*CUDA C\+\+ kernels: wanted libdeepinfer_cuda\.so for sm_90a, found none \(no nvcc"
    )
    (tmp_path / "cuda_not_built.txt").write_text("no nvcc was found when the package was built")
    monkeypatch.setattr(native_library, "NOT_BUILT", tmp_path / "cuda_not_built.txt")
    absent = native_library.part(tmp_path / "libdeepinfer_cuda.so")
    monkeypatch.setattr(native_library, "part", lambda: absent)
    with pytest.raises(BackendUnavailable, match=told):
        CudaBackend().probe()
    (listed,) = [found for found in list_backends() if found.name == "cuda"]
    assert listed.devices == () and "built without CUDA" in listed.error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AssertionError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"),
         "driver: wanted one that serves CUDA 13.0, found Found no NVIDIA driver on your system)"),
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"),
         "driver: wanted one that serves CUDA 13.0, found The NVIDIA driver on your system is too old (found version 11040))"),
        (RuntimeError("No CUDA GPUs are available"), "device: wanted a GPU that CUDA_VISIBLE_DEVICES lets through, found none)"),
    ],
)  # fmt: skip
def test_a_missing_driver_or_device_is_named_and_torchs_error_is_the_cause(error, told, calls, monkeypatch):
    def init():
        raise error

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(BackendUnavailable) as caught:
        CudaBackend().probe()
    assert told in str(caught.value) and caught.value.__cause__ is error


def test_an_h200_is_found_with_its_memory_and_what_is_known_of_its_kernels(calls, monkeypatch):
    monkeypatch.setattr(gpu, "triton_version", lambda: "3.6.0")
    (device,) = CudaOnHost().probe()
    assert (device.index, device.name, device.emulated, device.memory_bytes) == (0, "NVIDIA H200", False, 141 << 30)
    assert device.details["capability"] == "9.0" and device.details["state"] == "runs"
    assert device.details["kernels"].endswith("Triton")
    assert CudaOnHost().memory_info(0).total_bytes == 141 << 30 and CudaOnHost().capabilities(0).float8


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (12, 0)])
def test_another_architecture_gets_the_references_and_a_sentence(capability, monkeypatch):
    stand_in(monkeypatch.setattr, name="NVIDIA Other", capability=capability)
    monkeypatch.setattr(gpu, "triton_version", lambda: "3.6.0")
    backend = CudaOnHost()
    told = "compute capability: wanted 9.0, 10.0 or 10.3, found {}.{} (NVIDIA Other)".format(*capability)
    assert backend.kernels(0) == [] and told in backend.probe()[0].details["kernels"]
    assert told in backend.describe_build()["triton kernels"]


@pytest.mark.parametrize(("found", "told"), [(None, "none (it is not installed)"), ("3.5.1", "3.5.1"), ("2.3.0", "2.3.0")])
def test_without_a_triton_that_was_checked_the_references_serve_and_both_versions_are_told(found, told, calls, monkeypatch):
    monkeypatch.setattr(gpu, "triton_version", lambda: found)
    backend = CudaOnHost()
    sentence = f"Triton: wanted 3.6 or later, found {told}"
    assert backend.kernels(0) == [] and sentence in backend.probe()[0].details["kernels"]
    assert sentence in backend.describe_build()["triton kernels"]


# ---------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("case", list(device_cases()), ids=lambda case: case.id)
def test_the_suites_cases_of_a_device_pass_over_the_stand_in(case, calls):
    case.run(CudaOnHost(), 0)


def test_weights_keep_the_checkpoints_bytes():
    values = torch.randint(0, 256, (3, 64, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 64, 1), dtype=torch.uint8)
    backend, stored = CudaOnHost.__new__(CudaOnHost), CanonicalWeight("fp4_row32", values, scales)
    handle = backend.prepare_weight(0, "experts_gate_up", stored)
    assert torch.equal(handle.canonical().values, values) and handle.nbytes == values.numel() + scales.numel()
    assert handle.nbytes == backend.prepared_nbytes("experts_gate_up", (3, 64, 32), "fp4_row32")
    assert handle.canonical().values.data_ptr() == handle.canonical().values.data_ptr()


def test_the_guard_against_hidden_waits_is_taken_off_again(calls):
    with pytest.raises(RuntimeError, match="inside"), CudaOnHost().sync_guard(0):
        assert torch.cuda.get_sync_debug_mode() == "error"
        raise RuntimeError("inside")
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_profilers_range_ends_also_when_what_it_names_fails(calls):
    with pytest.raises(ValueError), CudaOnHost().range("decode"):
        raise ValueError
    assert names(calls)[-2:] == ["range_push", "range_pop"] and calls[-2].arguments == {"msg": "decode"}


def test_a_device_that_is_never_done_ends_the_wait(calls, monkeypatch):
    monkeypatch.setattr(Event.__bases__[0], "late", 60.0)
    with pytest.raises(RuntimeError, match="GPU 0 was not done after 0.05 s"):
        runtime.wait_bounded(0, 0.05)


def test_the_clock_adds_up_the_spans_between_its_readings(calls, monkeypatch):
    spans = iter((1500.0, 250.0))
    monkeypatch.setattr(Event, "elapsed_time", lambda self, end: next(spans))
    clock = CudaOnHost().timer(0)
    assert (clock(), clock()) == (1.5, 1.75)
    assert all(call.arguments["enable_timing"] for call in calls if call.name == "Event")


def test_marks_tell_the_time_between_them_and_do_not_wait(calls):
    backend = CudaOnHost()
    first, second = backend.mark(0), backend.mark(0)
    assert 0 <= first.elapsed_time(second) < 1e3
    assert "synchronize" not in names(calls)


def test_a_captured_step_replays_with_what_its_buffers_hold_now(calls):
    graphs = CudaOnHost().graphs(0)
    x, y = torch.ones(4), torch.zeros(4)
    graph = graphs.capture(lambda: y.copy_(x * 2 + 1))
    x.fill_(5)
    graph.replay()
    assert torch.equal(y, torch.full((4,), 11.0))
    graphs.capture(lambda: y.add_(1)).replay()
    captures = [call.arguments for call in calls if call.name == "graph"]
    assert len(captures) == 2 and captures[0]["pool"] == captures[1]["pool"]
    assert {capture["capture_error_mode"] for capture in captures} == {"thread_local"}


def test_a_step_runs_before_it_is_captured_so_that_its_kernels_are_compiled(calls):
    runs = []
    CudaOnHost().graphs(0).capture(lambda: runs.append("graph" in names(calls)))
    assert runs == [False, False, True]


def test_a_step_that_reads_a_value_cannot_be_captured_and_the_error_says_so(calls):
    x = torch.ones(1)
    with pytest.raises(RuntimeError, match="stream is capturing") as caught:
        CudaOnHost().graphs(0).capture(lambda: x.mul_(float(x[0])))
    assert any("a value was read on the host" in line for line in CudaBackend().explain_error(str(caught.value)))


# ---------------------------------------------------------------------------------------- ranks


def test_ranks_over_the_stand_ins_process_group(calls):
    case = next(case for case in communication_cases() if case.id == "ranks(op=dispatch_and_combine,world=2)")
    case.run(CudaOnHost(), 0)


def test_nccl_moves_device_tensors_and_needs_a_gpu_for_each_rank(calls):
    kind = CudaBackend().communicator(0)
    assert kind is nccl.NcclCommunicator and issubclass(kind, ReferenceCommunicator)
    assert not kind.shares_devices and kind._carrier_of(torch.device("meta", 1)) == torch.device("meta", 1)
    assert (calls[-1].name, calls[-1].arguments) == ("set_device", {"device": 1})


def test_a_broken_world_aborts_its_transfers_and_leaves_its_windows_to_nobody(calls, monkeypatch):
    ended = []
    broken = NcclOnHost.__new__(NcclOnHost)
    broken._broken, broken._carrier, broken.world = "", torch.device("cpu"), World(0, 2)
    broken._hearts = SimpleNamespace(stop=lambda why, lost: ended.append(("left", lost)))
    broken._group = SimpleNamespace(abort=lambda: ended.append("aborted"))
    broken._memory = SimpleNamespace(close=lambda: ended.append("unmapped"), keep=lambda: ended.append("kept"))
    broken.windows = Windows(0, [0, 0], 4 << 20, torch.device("cpu"), Event)
    broken._break("rank 1 was missed", (1,))
    broken.close()
    assert ended == [("left", (1,)), "aborted", "unmapped"] and "rank 1 was missed" in broken.windows
    with pytest.raises(CommunicatorError, match="this communicator of rank 0 is broken since rank 1 was missed"):
        windows_of(broken, torch.device("cpu"), "ep_combine(bf16[_, 32])")


def test_a_rank_that_dies_in_a_transfer_is_named_before_the_deadline():
    def never(index, seconds):
        time.sleep(seconds)
        raise event_time.NotDone(f"GPU {index} was not done after {seconds} s")

    comm, left = NcclOnHost.__new__(NcclOnHost), []
    comm._broken, comm._call, comm._calls, comm._carrier, comm._group = "", "all_gather", 1, torch.device("cpu"), None
    comm.world, comm.runtime = World(0, 2, deadline_s=30.0), SimpleNamespace(wait_bounded=never)
    comm._store = SimpleNamespace(delete_key=lambda key: None)
    comm._hearts = SimpleNamespace(
        gone=lambda rank: "is dead" if time.monotonic() - started > 0.2 else None, lost=lambda rank: (),
        stop=lambda why, lost: left.append(lost),
    )  # fmt: skip
    started = time.monotonic()
    with pytest.raises(CommunicatorTimeout, match="rank 1 is dead") as caught:
        comm._move(lambda: SimpleNamespace(wait=lambda: None))
    assert caught.value.ranks == (1,) and left == [(1,)] and time.monotonic() - started < 5


def test_ranks_without_windows_are_told_why():
    kept = SimpleNamespace(world_size=2, windows="rank 1 cannot reach the memory of rank 0")
    with pytest.raises(Unsupported, match="need windows into the memory of all ranks: rank 1 cannot reach"):
        windows_of(kept, torch.device("cpu"), "ep_combine(bf16[_, 32])")


def test_the_drivers_words_are_told_where_memory_cannot_be_shared(monkeypatch):
    class Driver:
        def cuMemAlloc_v2(self, address, nbytes):
            return 2

        def cuGetErrorName(self, status, text):
            text._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"

    monkeypatch.setattr(peer_memory, "_driver", Driver)
    with pytest.raises(OSError, match=r"cuMemAlloc_v2 says CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        peer_memory.PeerMemory(7).make(4 << 20)


def test_a_window_without_room_for_rows_is_refused():
    with pytest.raises(BadCall, match="no room for the rows of 64 ranks"):
        Windows(0, [0] * 64, 16 << 20, torch.device("cpu"), Event)


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("map", "rank 0 cannot reach the memory of rank 1: no way to there"),
        ("make", "rank 0 cannot make a window of 4194304 bytes: no way to there"),
        ("other", "rank 0 cannot reach the memory of rank 1: it has no window"),
        ("", "ranks [1] cannot reach the memory of others"),
    ],
)
def test_a_rank_that_cannot_reach_anothers_memory_is_named_on_every_rank(fails, told):
    class Memory(FileMemory):
        def make(self, nbytes):
            if fails == "make":
                raise OSError("no way to there")
            return 0, (1, 2)

        def map(self, handle):
            if fails == "map":
                raise OSError("no way to there")
            return 0

    said = iter(([() if fails == "make" else (1, 2), () if fails == "other" else (3, 4)], [(int(not fails),), (0,)]))
    comm = SimpleNamespace(rank=0, exchange=lambda call, numbers: next(said))
    assert open_windows(comm, Memory(), 4 << 20, torch.device("cpu"), Event) == told


def test_a_torch_without_nccl_is_told_before_ranks_meet_on_it(calls, monkeypatch):
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", None)
    with pytest.raises(BackendUnavailable, match="ranks on GPUs need a torch with NCCL"):
        nccl.NcclCommunicator._process_group(None, None)


# ---------------------------------------------------------------------------------------- kernels


def test_with_several_gpus_every_launch_says_which_and_with_one_it_costs_nothing(monkeypatch):
    kernel = Kernel("rope", "triton", lambda *args: seen.append((names(calls)[-1], args)), "triton::rope[sm90]", "yes", True)
    monkeypatch.setattr(gpu, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(kernels, "triton_kernels", lambda target: [kernel] if target.name == "sm90" else [])
    monkeypatch.setattr(kernels, "rank_kernels", lambda target: [])
    seen, calls = [], stand_in(monkeypatch.setattr, count=2)
    (offered,) = CudaOnHost().kernels(1)
    offered.fn(1, 2)
    assert seen == [("device", (1, 2))] and calls[-1].arguments == {"device": 1}
    assert (offered.symbol, offered.invariant, offered.capturable) == (kernel.symbol, "yes", True)
    stand_in(monkeypatch.setattr, count=1)
    assert CudaOnHost().kernels(0) == [kernel]


@pytest.mark.parametrize(("capability", "target"), [((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm103")])
def test_the_architecture_chooses_the_target_in_one_place(capability, target, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu, "triton_version", lambda: "3.9.0")
    for offer in ("triton_kernels", "rank_kernels"):
        monkeypatch.setattr(kernels, offer, lambda target, offer=offer: asked.append((offer, target.name)) or [])
    stand_in(monkeypatch.setattr, capability=capability)
    CudaOnHost().kernels(0)
    assert asked == [("triton_kernels", target), ("rank_kernels", target)]


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"), "device_lost"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "device_lost"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "device_lost"),
        (RuntimeError("CUDA error: unspecified launch failure"), "device_lost"),
        (RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"), "device_lost"),
        (RuntimeError("NCCL error: unhandled cuda error"), "unknown"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "unknown"),
        (ValueError("token 710 of 600 is not known"), "unknown"),
    ],
)  # fmt: skip
def test_errors_are_told_apart(error, kind):
    assert CudaBackend().classify_error(error) == kind


def test_every_error_is_explained_with_causes_and_a_source():
    for meaning in error_words.MEANINGS:
        assert meaning.causes and meaning.source.startswith("https://")
        assert meaning.kind in (error_words.OUT_OF_MEMORY, error_words.DEVICE_LOST, error_words.UNKNOWN)
        for words in meaning.words:
            assert meaning in error_words.explain(f"RuntimeError: {words} (1)")
    assert error_words.explain("nothing known") == []
    lines = CudaBackend().explain_error("CUDA error: device-side assert triggered")
    assert any("CUDA_LAUNCH_BLOCKING=1" in line for line in lines) and "docs.nvidia.com" in lines[-1]
