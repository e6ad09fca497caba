"""The checks of the Triton kernels and of torch_npu's calls, each in an environment of its own that a script makes.

An environment that cannot be had fails its tests with pip's message: without a package index leave them out with
`pytest -m 'not full and not index'`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = (".", "hal", "backends/cpu", "backends/triton", "tools", "tools/cuda", "tools/ascend")
for part in PARTS:
    sys.path.insert(0, str(ROOT / part))

import assemble_triton  # noqa: E402
import check_torch_npu  # noqa: E402
import lower_triton  # noqa: E402
from ascend_venvs import lowering_python, torch_npu_python  # noqa: E402
from virtual_environment import EnvironmentFailed  # noqa: E402

pytestmark = [pytest.mark.index, pytest.mark.timeout(900)]  # a worker may wait until another has made the environment
triton_python = assemble_triton.triton_python
VERSIONS = (assemble_triton.WRITTEN_FOR, assemble_triton.NEWEST)
HALF = "attention or select or score_index or store or sample or logprobs or boundary or load_kv or write_kv"
"""About half of the interpreter's work, so that two workers share it; the other half is whatever this leaves."""


def need(make, *arguments):
    """The environment's Python, or a failure that ends with pip's message."""
    try:
        return make(*arguments)
    except EnvironmentFailed as failed:
        pytest.fail(str(failed), pytrace=False)


def stored(report):
    """The rows of a report under reports/."""
    return json.loads((ROOT / "reports" / report).read_text(encoding="utf-8"))["kernels"]


def kernels_of(rows):
    """Which kernels rows are about, and for which problems: problems that launch the same kernel share a row."""
    return {(row["problem"], row["kernel"]) for row in rows}


@pytest.mark.parametrize("share", [f"({HALF})", f"not ({HALF})"], ids=["caches and sampling", "the others"])
def test_the_kernels_agree_with_their_cards_in_the_interpreter(share):
    python = need(triton_python, assemble_triton.WRITTEN_FOR)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-k", f"not at_size and {share}"]
    files = ["tests/conformance/test_triton_kernels.py", "tests/conformance/test_triton_boundary.py"]
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_a_warm_start_takes_the_kernel_that_triton_would_take():
    python = need(triton_python, assemble_triton.WRITTEN_FOR)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "tests/triton/test_warm_starts.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize("share", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_ranks_meet_and_exchange_rows_through_windows_in_the_interpreter(share):
    python = need(triton_python, assemble_triton.WRITTEN_FOR)
    parts = os.pathsep.join(str(ROOT / part) for part in (*PARTS, "backends/cuda"))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": parts}
    command = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", "-m", share]
    command.append("tests/conformance/test_triton_ranks.py")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize("target", ["sm90", "sm100", pytest.param("sm103", marks=pytest.mark.full)])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_kernel_assembles_with_the_matrix_unit_of_its_target_and_without_spills(version, target):
    need(triton_python, version)
    rows = assemble_triton.assemble(version, target, [], [])
    assert [f"{row['problem']}: {row['objections']}" for row in rows if row["objections"]] == []
    assert {row["triton"] for row in rows} == {version} and all(row["spill_bytes"] == 0 for row in rows)
    assert kernels_of(rows) == kernels_of(stored("triton/assemble.json"))


def test_quantised_products_reach_the_block_scaled_matrix_unit_of_sm100():
    need(triton_python, assemble_triton.WRITTEN_FOR)
    rows = assemble_triton.assemble(assemble_triton.WRITTEN_FOR, "sm100", ["linear wq_a", "grouped_gemm gate_up"], [])
    assert all("kind::mxf8f6f4.block_scale" in "".join(row["matrix_instructions"]) for row in rows) and len(rows) == 2


def test_a_tile_of_64_weight_rows_fails_the_check_on_sm100():
    need(triton_python, assemble_triton.WRITTEN_FOR)
    (row,) = assemble_triton.assemble(assemble_triton.WRITTEN_FOR, "sm100", ["grouped_gemm gate_up"], ["features=64"])
    assert row["matrix_instructions"] == ["tcgen05.mma.cta_group::1.kind::f16"]
    assert row["objections"] == ["quantised operands meet as kind::f16, not as kind::mxf8f6f4.block_scale"]


def test_the_same_product_is_wgmma_on_sm90():
    need(triton_python, assemble_triton.WRITTEN_FOR)
    (row,) = assemble_triton.assemble(assemble_triton.WRITTEN_FOR, "sm90", ["grouped_gemm gate_up"], [])
    assert row["registers"] <= 255 and row["matrix_instructions"][0].startswith("wgmma.mma_async")


@pytest.mark.parametrize("soc", lower_triton.SOCS)
def test_kernels_lower_to_an_ascend_950_and_the_products_land_on_the_cube(soc):
    need(lowering_python)
    rows = lower_triton.lower([soc, *lower_triton.QUICK])
    assert [f"{row['problem']}: {row['objections']}" for row in rows if row["objections"]] == []
    assert len({row["kernel"] for row in rows}) >= 8 and {row["soc"] for row in rows} == {soc}
    products = [row for row in rows if row["product"]]
    assert products and all(row["cube_products"] > 0 for row in products)
    assert all(row["vector_functions"] > 0 for row in rows if row["kernel"] == "rms_norm_kernel")


@pytest.mark.parametrize("soc", lower_triton.SOCS)
def test_a_tile_too_large_for_the_unified_buffer_fails_with_overflow(soc):
    need(lowering_python)
    (row,) = lower_triton.lower([soc, *lower_triton.TOO_LARGE])
    assert "ub overflow" in row["objections"][0]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_kernel_lowers_for_both_chips():
    need(lowering_python)
    rows = lower_triton.lower(list(lower_triton.SOCS))
    assert [f"{row['problem']} for {row['soc']}: {row['objections']}" for row in rows if row["objections"]] == []
    assert kernels_of(rows) == kernels_of(stored("ascend/lowering.json"))


def test_every_torch_npu_call_is_registered_and_every_mutant_is_noticed():
    need(torch_npu_python)
    report = check_torch_npu.run()
    assert check_torch_npu.failures(report) == []
    assert len(report["vendor_ops"]) <= 6 and all(row["mutants"] >= 5 for row in report["vendor_ops"])
    assert len(report["runtime_calls"]) >= 20 and report["runtime_mutants"] >= 2 * len(report["runtime_calls"])


def test_an_environment_that_cannot_be_had_is_a_failure_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.fail.Exception, match="No matching distribution(.|\n)*not full and not index"):
        need(triton_python, assemble_triton.WRITTEN_FOR)
