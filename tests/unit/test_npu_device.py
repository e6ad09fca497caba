"""The NPU device without an NPU: its slots over a stand-in for torch_npu, the kernel library's binding, errors in words."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepinfer_ascend import error_codes, npu, npu_communicator, npu_library, npu_runtime, twin
from deepinfer_ascend.backend import AscendBackend
from deepinfer_hal.conformance import Plan, run_suite
from deepinfer_hal.conformance.communication import communication_cases, seats
from deepinfer_hal.conformance.device_cases import device_cases
from deepinfer_hal.conformance.verdict import Declined
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.reference_communicator import ReferenceCommunicator
from deepinfer_hal.workspaces import StreamWorkspaces

from tests.unit import npu_on_host
from tests.unit.npu_on_host import NpuOnHost, stand_in

ROOT = Path(__file__).parents[2]
needs_twin = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))


@pytest.fixture
def calls(monkeypatch):
    """The stand-in is torch_npu during the test; what it was called with."""
    for owner, name in ((npu, "unavailable_reason"), (npu, "torch_npu_version"), (torch.Tensor, "pin_memory")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    return stand_in()


def paths(calls) -> list[str]:
    return [call.path.removeprefix("torch_npu.npu.") for call in calls]


# ---------------------------------------------------------------------------------------- what is there


def test_finding_backends_imports_no_torch_npu():
    code = "import sys; from deepinfer_hal.registry import list_backends; list_backends(); sys.exit('torch_npu' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    for path in (ROOT / "backends/ascend/deepinfer_ascend").glob("*.py"):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        names = [alias.name for node in top if isinstance(node, ast.Import) for alias in node.names]
        assert "torch_npu" not in names, path.name


def test_another_chip_is_named_beside_the_one_wanted(calls, monkeypatch):
    monkeypatch.setattr(twin, "_load", lambda: (None, "the twin is not built"))
    stand_in(soc="Ascend910B3")
    with pytest.raises(BackendUnavailable, match=r"SoC: wanted Ascend950\*, which dav-3510 code runs on, found Ascend910B3"):
        NpuOnHost().probe()
    assert "found Ascend910B3" in NpuOnHost().describe_build()["npu"]


@needs_twin
def test_a_torch_npu_that_cannot_be_loaded_is_told_and_leaves_the_twin(calls, monkeypatch):
    def broken():
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(npu, "devices", broken)
    assert [device.name for device in AscendBackend().probe()] == ["twin"]
    assert "ImportError: libhccl.so" in AscendBackend().describe_build()["npu"]


def test_an_ascend_950_is_found_with_its_cores_and_its_memory(calls):
    device = NpuOnHost().probe()[0]
    assert (device.index, device.name, device.emulated) == (0, "npu Ascend950PR_9579", False)
    assert device.details["vector_cores"] == "56" and device.details["state"] == "written"
    assert NpuOnHost().memory_info(0).total_bytes == 112 << 30


@pytest.mark.parametrize(
    ("torch_npu", "told"),
    [(None, "none"), ("2.12.0", "2.12.0, which belongs to torch 2.12"), ("2.14.0", "2.14.0, which belongs to torch 2.14")],
)
def test_a_torch_npu_of_another_release_is_refused_with_its_version(torch_npu, told, monkeypatch):
    monkeypatch.setattr(npu, "torch_npu_version", lambda: torch_npu)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    part = npu.parts()[-1]
    assert not part.ok and part.found.startswith(told) and part.wanted == "2.13.* beside torch 2.13.0"


# ---------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("case", list(device_cases()), ids=lambda case: case.id)
def test_the_suites_cases_of_a_device_pass_over_the_stand_in(case, calls):
    case.run(NpuOnHost(), 0)


def test_torchs_own_launches_are_put_in_order_with_ours(calls):
    npu_runtime.open_device(0)
    assert sys.modules["torch_npu"].task_queue == [0]
    assert npu_runtime.current_stream_pointer(0) == 0 and paths(calls)[-1] == "current_stream"


def test_the_guard_against_hidden_waits_is_taken_off_again(calls):
    module = sys.modules["torch_npu"]
    with pytest.raises(RuntimeError, match="inside"), NpuOnHost().sync_guard(0):
        assert module.npu.get_sync_debug_mode() == "error"
        raise RuntimeError("inside")
    assert module.npu.get_sync_debug_mode() == 0


def test_a_device_that_is_never_done_ends_the_wait(calls, monkeypatch):
    monkeypatch.setattr(npu_on_host.fake_torch_npu.Event, "late", 60.0)
    with pytest.raises(RuntimeError, match="NPU 0 was not done after 0.05 s"):
        npu_runtime.wait_bounded(0, 0.05)


def test_a_captured_step_replays_with_what_its_buffers_hold_now(calls):
    graphs = NpuOnHost().graphs(0)
    x, y = torch.ones(4), torch.zeros(4)
    graph = graphs.capture(lambda: y.copy_(x * 2 + 1))
    x.fill_(5)
    graph.replay()
    assert torch.equal(y, torch.full((4,), 11.0))
    again = graphs.capture(lambda: y.add_(1))
    again.replay()
    pools = [call.kwargs["pool"] for call in calls if call.path == "torch_npu.npu.graph"]
    assert len(pools) == 2 and pools[0] == pools[1]
    assert paths(calls).index("Stream.wait_stream") < paths(calls).index("NPUGraph")


def test_a_step_that_reads_a_value_cannot_be_captured_and_the_error_says_so(calls):
    x = torch.ones(1)
    with pytest.raises(RuntimeError, match="107027") as caught:
        NpuOnHost().graphs(0).capture(lambda: x.mul_(float(x[0])))
    assert any("being captured" in line for line in AscendBackend().explain_error(str(caught.value)))


def test_ranks_over_the_stand_ins_process_group(calls):
    case = next(case for case in communication_cases() if case.id == "ranks(op=dispatch_and_combine,world=2)")
    case.run(NpuOnHost(), 0)


@needs_twin
def test_an_emulated_device_is_no_seat_of_a_rank_beside_an_npu(calls, monkeypatch):
    monkeypatch.setattr(NpuOnHost, "communicator", AscendBackend.communicator)
    assert [device.name for device in NpuOnHost().probe()] == ["npu Ascend950PR_9579", "twin"]
    with pytest.raises(Declined, match="2 ranks need 2 devices, there are 1"):
        seats(NpuOnHost(), 0, 2)


def test_hccl_moves_device_tensors_and_needs_a_device_for_each_rank(calls):
    kind = AscendBackend().communicator(0)
    assert kind is npu_communicator.HcclCommunicator and issubclass(kind, ReferenceCommunicator)
    assert not kind.shares_devices and kind._carrier_of(torch.device("meta", 1)) == torch.device("meta", 1)
    assert calls[-2].args == (1,) and paths(calls)[-2:] == ["set_device", "set_task_queue_enable"]


# ---------------------------------------------------------------------------------------- the kernel library


def test_a_library_for_another_architecture_is_not_loaded(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(npu_library, "LIBRARY", tmp_path / "libdeepinfer_npu.so")
    assert "found none (tools/ascend/build_npu.sh" in str(npu_library.part())
    (tmp_path / "libdeepinfer_npu.so").write_bytes(b"")
    assert "does not describe" in str(npu_library.part())
    (tmp_path / "libdeepinfer_npu.json").write_text('{"architecture": "dav-2201", "cann": "9.0.0"}')
    assert "found dav-2201, built with CANN 9.0.0" in str(npu_library.part())
    assert npu_library.kernels(0, torch.device("cpu")) == ()
    told = {"architecture": "dav-3510", "cann": "9.2.0", "failed": ["rope"], "sources": "0" * 16}
    (tmp_path / "libdeepinfer_npu.json").write_text(json.dumps(told))
    part = npu_library.part()
    assert part.ok and "without rope, which did not compile, from other sources" in part.found


def test_each_stream_has_a_workspace_that_stays_where_it_is():
    rooms = StreamWorkspaces(torch.device("cpu"), 4096)
    first, second = rooms(16), rooms(32)
    assert first != second and first[1] == 4096 and (rooms(16), rooms(32)) == (first, second)


@needs_twin
def test_kernels_of_a_library_are_bound_and_right():
    told = json.dumps({"architecture": "dav-3510", "cann": "9.2.0"})
    opener = "tests.unit.npu_on_host:open_with_library"
    plan = Plan(spec=told, opener=opener, ops=("embedding_gather", "stream_collapse"), checks=("values", "claims"))
    run = run_suite(plan)
    served = {result.op for result in run.results if result.verdict == "pass" and result.provider == "ascendc"}
    assert served == {"embedding_gather", "stream_collapse"} and run.exit_status() == 0, [r.line() for r in run.results]
    assert all(kernel["capturable"] for kernel in run.subject["kernels"])
    assert not {"ep_dispatch", "ep_combine"} & {kernel["op"] for kernel in run.subject["kernels"]}


@needs_twin
def test_nano_generates_the_same_text_through_the_npus_binding_as_on_the_twin():
    code = "from tests.unit.npu_on_host import generate; print(generate('ascend:0', 6), generate('ascend:twin', 6), sep='|')"
    environment = {**os.environ, "PYTHONPATH": ":".join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    through_npu, on_twin = done.stdout.strip().splitlines()[-1].split("|")
    assert through_npu == on_twin and len(json.loads(on_twin)) == 6


def test_a_case_that_loses_the_device_takes_no_other_case_along(tmp_path):
    opener = "tests.unit.npu_on_host:open_with_a_fault"
    run = run_suite(Plan(spec=str(tmp_path / "happened"), opener=opener, ops=("stream_collapse",), checks=("values",)))
    verdicts = [result.verdict for result in run.results]
    assert verdicts.count("fail") == 1 and verdicts.count("pass") >= 2 and set(verdicts) <= {"fail", "pass", "not-run"}
    (failed,) = [result for result in run.results if result.verdict == "fail"]
    assert "507035" in failed.failures["values"]


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("NPU out of memory. Tried to allocate 5 GiB"), "out_of_memory"),
        (RuntimeError("call aclnnX failed, error code is 207001\nEL0004: Failed to allocate memory"), "out_of_memory"),
        (RuntimeError("ACL stream synchronize failed, error code:507035"), "device_lost"),
        (RuntimeError("vector core timeout, runtime result = 507034."), "device_lost"),
        (RuntimeError("NPU function error: aclrtX, error code is 107002"), "unknown"),
        (RuntimeError("call aclnnX failed, error code is 561103"), "unknown"),
        (RuntimeError("some other failure, error code is 507999"), "device_lost"),
        (ValueError("token 507035 of 600000 is not known"), "unknown"),
        (ValueError("token 123456"), "unknown"),
    ],
)
def test_errors_are_told_apart(error, kind):
    assert AscendBackend().classify_error(error) == kind


def test_the_codes_people_meet_are_explained_with_causes_and_a_source():
    for code in ("507018", "507034", "507035", "561000", "107030", "107002", "207001"):
        (meaning,) = error_codes.explain(code)
        assert meaning.words == (code,) and not meaning.says.startswith("not listed")
    for meaning in (*error_codes.CODES.values(), *error_codes.WORDS):
        assert meaning.causes and meaning.source.startswith("https://")
        assert meaning.kind in ("out_of_memory", "device_lost", "unknown")
    assert error_codes.explain("507099")[0].says.startswith("not listed here; by its first digit")
    assert error_codes.explain("nothing known") == []


def test_every_name_of_torch_npu_in_the_sources_is_called_by_a_path_that_the_check_runs():
    import npu_paths

    called = {call.path for call in npu_paths.recorded()}
    assert npu_paths.named_in_sources() <= called
