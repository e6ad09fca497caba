"""The CUDA backend's offers serve nano: its kernels in Triton's interpreter on host memory, beside the CPU backend.

It shows that the offers bind and compute what the network needs. It shows nothing of a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepinfer_hal.card import all_cards

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/cuda")]

from triton_venvs import WRITTEN_FOR, triton_python  # noqa: E402
from virtual_environment import EnvironmentFailed  # noqa: E402

pytestmark = [pytest.mark.index, pytest.mark.timeout(900)]
PARTS = (".", "hal", "backends/cpu", "backends/triton", "backends/ascend", "backends/cuda")


def interpreted(tokens: int, chunk: int) -> dict:
    """What `nano_interpreted.py` prints, run where Triton is."""
    try:
        python = triton_python(WRITTEN_FOR)
    except EnvironmentFailed as failed:
        pytest.fail(str(failed), pytrace=False)
    paths = ":".join(str(ROOT / part) for part in PARTS)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [str(python), "-m", "tests.triton.nano_interpreted", str(tokens), str(chunk)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_op_of_nano_is_bound_to_a_triton_kernel():
    choices = dict(choice.split() for choice in interpreted(0, 0)["choices"])
    assert set(choices) <= set(all_cards()) and set(choices.values()) == {"triton"}
    assert {"linear", "rms_norm", "score_index", "sparse_attention", "write_kv", "moe_layer", "sample"} <= set(choices)


@pytest.mark.full
def test_nanos_tokens_through_the_offers_are_the_cpus_in_a_prefill_and_in_a_chunk_that_continues_it():
    told = interpreted(8, 5)
    sure = [gap > told["tau"] for gap in told["gap"]]
    assert len(sure) == 8 and sum(sure) >= 2
    assert [t for t, s in zip(told["cuda"], sure, strict=True) if s] == [t for t, s in zip(told["cpu"], sure, strict=True) if s]
    assert told["kl"] <= 5e-3 and told["largest_difference"] > 0
