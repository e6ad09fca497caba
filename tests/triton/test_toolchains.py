"""The checks of the Triton kernels and of torch_npu's calls that need an environment of their own, made on first use.

An environment that cannot be had skips its tests with pip's message: nothing here can run without those packages.
"""

from __future__ import annotations

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

pytestmark = pytest.mark.full  # four environments with compilers of their own
triton_python = assemble_triton.triton_python


def need(make, *arguments):
    """The environment's Python, or a skip that ends with pip's message."""
    try:
        return make(*arguments)
    except EnvironmentFailed as failed:
        pytest.skip(str(failed))


@pytest.mark.timeout(900)
def test_the_kernels_agree_with_their_cards_in_the_interpreter():
    python = need(triton_python, assemble_triton.WRITTEN_FOR)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", "-k", "not at_size"]
    done = subprocess.run(
        [*command, "tests/conformance/test_triton_kernels.py"], cwd=ROOT, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.timeout(600)
def test_quantised_products_reach_the_block_scaled_matrix_unit_of_sm100():
    need(triton_python, assemble_triton.WRITTEN_FOR)
    rows = assemble_triton.assemble(assemble_triton.WRITTEN_FOR, "sm100", ["linear wq_a", "grouped_gemm gate_up"], [])
    assert [row["objections"] for row in rows] == [[], []]
    assert all("kind::mxf8f6f4.block_scale" in "".join(row["matrix_instructions"]) for row in rows)


@pytest.mark.timeout(600)
def test_a_tile_of_64_weight_rows_fails_the_check_on_sm100():
    need(triton_python, assemble_triton.WRITTEN_FOR)
    (row,) = assemble_triton.assemble(assemble_triton.WRITTEN_FOR, "sm100", ["grouped_gemm gate_up"], ["features=64"])
    assert row["matrix_instructions"] == ["tcgen05.mma.cta_group::1.kind::f16"]
    assert row["objections"] == ["quantised operands meet as kind::f16, not as kind::mxf8f6f4.block_scale"]


@pytest.mark.timeout(600)
def test_the_same_product_is_wgmma_on_sm90_and_spills_nothing():
    need(triton_python, assemble_triton.WRITTEN_FOR)
    (row,) = assemble_triton.assemble(assemble_triton.WRITTEN_FOR, "sm90", ["grouped_gemm gate_up"], [])
    assert row["objections"] == [] and row["spill_bytes"] == 0 and row["registers"] <= 255
    assert row["matrix_instructions"][0].startswith("wgmma.mma_async")


@pytest.mark.timeout(600)
def test_kernels_lower_to_an_ascend_950_and_the_product_lands_on_the_cube():
    need(lowering_python)
    rows = lower_triton.lower([lower_triton.SOCS[0], "rms_norm", "linear router"])
    assert [row["objections"] for row in rows] == [[], []]
    assert rows[0]["vector_functions"] > 0 and rows[1]["cube_products"] > 0


@pytest.mark.timeout(600)
def test_a_tile_too_large_for_the_unified_buffer_fails_with_overflow():
    need(lowering_python)
    (row,) = lower_triton.lower([lower_triton.SOCS[0], *lower_triton.TOO_LARGE])
    assert "ub overflow" in row["objections"][0]


@pytest.mark.timeout(600)
def test_every_torch_npu_call_is_registered_and_every_mutant_is_noticed():
    need(torch_npu_python)
    report = check_torch_npu.run()
    assert check_torch_npu.failures(report) == []
    assert len(report["vendor_ops"]) <= 6 and all(row["mutants"] >= 5 for row in report["vendor_ops"])
    assert len(report["runtime_calls"]) >= 20 and report["runtime_mutants"] >= 2 * len(report["runtime_calls"])
