"""The Ascend backend without an NPU: what is missing is named, the twin is opened by name, weights keep their bytes."""

from __future__ import annotations

import pytest
import torch
from deepinfer_ascend import npu, support, twin
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend
from deepinfer_hal.errors import BackendUnavailable, BadCall
from deepinfer_hal.kernel import CallSpec, No, Yes
from deepinfer_hal.registry import backend_names, list_backends, open_backend
from deepinfer_hal.weights import CanonicalWeight

needs_twin = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))


def test_it_is_found_but_auto_does_not_choose_the_twin():
    assert "ascend" in backend_names() and any(found.name == "ascend" for found in list_backends())
    backend, index = open_backend("auto")
    emulated = {device.index: device.emulated for device in backend.probe()}
    assert not emulated[index]


def test_what_an_npu_lacks_is_named_with_both_versions(monkeypatch, tmp_path):
    monkeypatch.setattr(npu, "_DRIVER_INFO", tmp_path / "version.info")
    monkeypatch.setattr(npu, "_TOOLKITS", ())
    monkeypatch.setattr(npu, "_DEVICES", tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    (tmp_path / "version.cfg").write_text("Version=[8.3.0]\n")
    reason = npu.unavailable_reason()
    assert "driver: wanted the Ascend HDK driver, found none" in reason
    assert "CANN: wanted 9.0 or later, found 8.3.0" in reason
    (tmp_path / "version.info").write_text("Version=26.0.1\n")
    (tmp_path / "version.cfg").write_text("Version=[9.1.0]\n")
    driver, nodes, toolkit, _ = npu.parts()
    assert driver.ok and driver.found == "26.0.1" and toolkit.ok
    assert not nodes.ok and nodes.found == "none"
    (tmp_path / "davinci3").touch()
    assert npu.parts()[1].found == "davinci3"
    assert "written" in AscendBackend().describe_build()["npu"]


def test_without_npu_and_twin_the_error_names_both(monkeypatch):
    monkeypatch.setattr(twin, "_load", lambda: (None, "the twin is not built (no module)"))
    monkeypatch.setattr(npu, "unavailable_reason", lambda: "torch_npu: wanted 2.13, found none")
    with pytest.raises(BackendUnavailable, match="torch_npu: wanted 2.13.*twin is not built"):
        AscendBackend().probe()


def test_a_double_is_refused_with_the_reason():
    assert support.answer(CallSpec("linear", {"x": "bf16"})) == Yes()
    refused = support.answer(CallSpec("sparse_attention", {"q": "bf16", "window_format": "fp8_32", "compressed_format": "bf16"}))
    assert isinstance(refused, No) and "compressed_format" in refused.reason
    assert support.answer(CallSpec("linear", {"x": "f64"})) == No("x is float64, which the vector unit does not have")


@needs_twin
def test_the_twin_opens_by_name_and_by_index():
    for spec in ("ascend:twin", f"ascend:{TWIN_INDEX}"):
        backend, index = open_backend(spec)
        assert (backend.name, index) == ("ascend", TWIN_INDEX) and backend.device(index).type == "cpu"
    with pytest.raises(BackendUnavailable, match="'tpu'"):
        open_backend("ascend:tpu")


@needs_twin
def test_its_kernels_are_those_the_library_exports():
    kernels = {kernel.op: kernel for kernel in AscendBackend().kernels(TWIN_INDEX)}
    assert set(kernels) == set(twin.ops()) and kernels["rms_norm"].symbol == "di_rms_norm"
    assert all(kernel.provider == "ascendc" and kernel.invariant == "yes" for kernel in kernels.values())


@needs_twin
def test_weights_keep_the_checkpoints_bytes_and_slots_are_views():
    values = torch.randint(0, 256, (3, 64, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 64, 1), dtype=torch.uint8)
    stored = CanonicalWeight("fp4_row32", values, scales)
    handle = AscendBackend().prepare_weight(TWIN_INDEX, "experts_gate_up", stored)
    assert torch.equal(handle.canonical().values, values) and handle.shape == (3, 64, 32)
    slot = handle.slot(1)
    assert slot.tiles.data_ptr() == handle.tiles[1].data_ptr() and slot.lines.data_ptr() == handle.lines[1].data_ptr()
    assert torch.equal(slot.canonical().values, values[1])
    assert torch.equal(slot.dequantise(), stored.dequantise()[1])
    with pytest.raises(BadCall, match="3 slots, asked for 3"):
        handle.slot(3)
