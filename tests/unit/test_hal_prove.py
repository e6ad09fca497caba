"""`deepinfer hal prove`: a vendor op is offered where its cases passed on exactly this chip and these versions, else not."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from deepinfer_ascend import npu, npu_library, vendor_ops
from deepinfer_hal import proofs
from deepinfer_hal.errors import BackendError, BackendUnavailable, BadCall
from deepinfer_hal.kernel import CallSpec, No, Yes

from deepinfer.cli.main import main
from tests.unit.npu_on_host import NpuOnHost, stand_in

OPENER = "tests.unit.npu_on_host:open_candidates"
SYMBOL = "npu::npu_mhc_post"


@pytest.fixture
def on_host(monkeypatch, tmp_path):
    """An NPU of the stand-in, without a kernel library, and proofs in a folder of the test's own."""
    for owner, name in ((npu, "unavailable_reason"), (npu, "torch_npu_version"), (torch.Tensor, "pin_memory")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(npu_library, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path))
    stand_in()
    return NpuOnHost()


def offered(backend) -> list[str]:
    return [kernel.symbol for kernel in backend.kernels(0)]


def proof(backend, **changes) -> proofs.Proof:
    made = proofs.Proof("hyper_connection_post", SYMBOL, dict(backend.proof_key(0)), passed=4, failed=0, declined=1)
    return dataclasses.replace(made, **changes)


def prove(quality: str) -> proofs.Proof:
    (made,) = proofs.prove(quality, ("hyper_connection_post",), opener=OPENER)
    return made


def test_a_vendor_op_whose_cases_pass_is_offered_from_then_on(on_host):
    assert offered(on_host) == []
    made = prove("right")
    assert made.holds and made.passed >= 3 and made.declined >= 1, made.line()  # float32 streams are declined
    assert made.key["soc"] == "Ascend950PR_9579" and made.key["cann"] == "9.2.0" and made.key["torch_npu"] == "2.13.0"
    proofs.store("ascend", [made])
    assert offered(on_host) == [SYMBOL]


def test_a_vendor_op_with_a_failing_case_is_not_proven(on_host):
    made = prove("wrong")
    assert not made.holds and made.failed > 0 and "hyper_connection_post(" in made.first_failure
    proofs.store("ascend", [made])
    assert offered(on_host) == [] and made.line().startswith("NOT proven")


@pytest.mark.parametrize("other", [{"soc": "Ascend950DT_9591"}, {"cann": "9.2.1"}, {"torch_npu": "2.13.0.post1"}])
def test_a_proof_for_another_chip_or_version_does_not_hold(on_host, other):
    proofs.store("ascend", [proof(on_host)])
    assert offered(on_host) == [SYMBOL]
    stand_in(**other)
    assert offered(NpuOnHost()) == []
    proofs.store("ascend", [proof(NpuOnHost())])
    assert offered(NpuOnHost()) == [SYMBOL] and len(proofs.read("ascend")) == 2


def test_a_proof_of_another_mapping_does_not_hold(on_host, monkeypatch):
    proofs.store("ascend", [proof(on_host)])
    monkeypatch.setattr(vendor_ops, "digest", lambda: "0" * 16)
    assert offered(on_host) == []


@pytest.mark.parametrize("changes", [{"passed": 0}, {"failed": 1}])
def test_nothing_run_or_something_failed_proves_nothing(on_host, changes):
    proofs.store("ascend", [proof(on_host, **changes)])
    assert offered(on_host) == []


def test_a_new_proof_replaces_the_old_one(on_host):
    proofs.store("ascend", [proof(on_host)])
    proofs.store("ascend", [proof(on_host, failed=2)])
    assert offered(on_host) == [] and len(proofs.read("ascend")) == 1


def test_a_damaged_proof_file_is_named(on_host):
    path = proofs.store("ascend", [proof(on_host)])
    path.write_text(json.dumps({"kind": "deepinfer-hal-proofs", "schema": 99, "proofs": []}))
    with pytest.raises(BackendError, match="ascend.json cannot be read.*run `deepinfer hal prove` again"):
        offered(on_host)


def test_without_an_npu_there_is_nothing_to_prove_and_it_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(npu, "unavailable_reason", lambda: "CANN: wanted 9.0 or later, found none")
    assert main(["hal", "prove", "--backend", "ascend"]) == 2
    told = capsys.readouterr().err
    assert "no candidate to prove" in told or "no NPU" in told
    assert "CANN: wanted 9.0 or later, found none" in told


def test_an_op_without_a_vendor_op_is_a_mistake_that_names_those_with_one(on_host):
    with pytest.raises(BadCall, match="no candidate for sample; it has hyper_connection_post, permute"):
        proofs.prove("right", ("sample",), opener=OPENER)
    with pytest.raises(BackendUnavailable, match="has no candidate to prove"):
        proofs.prove("cpu")


@pytest.mark.parametrize(
    ("op", "statics", "served"),
    [
        ("rms_norm", {"x": "bf16"}, True),
        ("rms_norm", {"x": "f64"}, False),
        ("hyper_connection_post", {"streams": "bf16"}, True),
        ("hyper_connection_post", {"streams": "f32"}, False),
        ("hyper_connection_post", {}, False),
        ("permute", {"x": "bf16", "x_scale": None, "count": None}, True),
        ("permute", {"x": "u8", "x_scale": "u8", "count": None}, False),
        ("permute", {"x": "bf16"}, False),
        ("unpermute", {"rows": "bf16"}, True),
    ],
)
def test_calls_that_a_vendor_op_cannot_serve_are_declined(op, statics, served):
    kernel = next(kernel for kernel in vendor_ops.kernels() if kernel.op == op)
    assert isinstance(kernel.supports(CallSpec(op, statics)), Yes if served else No)


def test_at_most_six_are_mapped_each_with_its_differences_and_no_op_is_both_mapped_and_unfit():
    assert len(vendor_ops.VENDOR_OPS) <= 6 and all(len(op.differences) >= 3 for op in vendor_ops.VENDOR_OPS)
    assert not {op.name for op in vendor_ops.VENDOR_OPS} & set(vendor_ops.UNFIT)
    assert all(kernel.invariant == "unknown" and not kernel.capturable for kernel in vendor_ops.kernels())


def test_the_page_of_vendor_ops_has_every_difference_and_reason():
    page = (Path(__file__).parents[2] / "docs/ascend-vendor-ops.md").read_text(encoding="utf-8")
    for op in vendor_ops.VENDOR_OPS:
        assert f"`{op.name}` for {op.card}" in page and all(f"- {one}\n" in page for one in op.differences)
    assert all(f"| `{name}` | {reason} |" in page for name, reason in vendor_ops.UNFIT.items())


def test_the_command_explains_codes(capsys):
    assert main(["hal", "explain", "507035"]) == 0
    assert "vector core failed" in capsys.readouterr().out
    assert main(["hal", "explain", "--backend", "ascend", "nothing", "known"]) == 1
    assert "no backend here knows this error" in capsys.readouterr().err
