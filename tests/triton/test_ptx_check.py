"""The PTX check on texts, each with one thing wrong: it needs neither Triton nor a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "cuda"))
from ptx_check import objections  # noqa: E402

SCALED = ".target sm_100a\n@%p1 tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%r1], ...;\n"
HALF = ".target sm_100a\n@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], ...;\n"
HOPPER = ".target sm_90a\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1};\n"


def test_good_kernels_meet_no_objection():
    assert objections(SCALED, "sm100", True, True, 0) == []
    assert objections(HALF, "sm100", True, False, 0) == []
    assert objections(HOPPER, "sm90", True, True, 0) == []
    assert objections(SCALED.replace("sm_100a", "sm_103a"), "sm103", True, True, 0) == []
    assert objections(".target sm_100a\n", "sm100", False, False, 0) == []


@pytest.mark.parametrize(
    ("ptx", "target", "product", "quantised", "spill", "told"),
    [
        (HALF, "sm100", True, True, 0, "kind::f16"),
        (SCALED + HALF, "sm100", True, True, 0, "kind::f16"),
        (".target sm_100a\nmma.sync.aligned.m16n8k16;\n", "sm100", True, True, 0, "not tcgen05.mma"),
        (".target sm_90a\nmma.sync.aligned.m16n8k16;\n", "sm90", True, False, 0, "not wgmma"),
        (SCALED.replace("sm_100a", "sm_100"), "sm100", True, True, 0, "not for sm_100a"),
        (SCALED, "sm103", True, True, 0, "not for sm_103a"),
        (HALF.replace("sm_100a", "sm_103a"), "sm103", True, True, 0, "kind::f16"),
        (HOPPER, "sm90", True, True, 16, "16 bytes a thread are spilled"),
        (SCALED + "\ttrap;\n", "sm100", True, True, 0, "trap"),
    ],
)
def test_each_fault_is_named(ptx, target, product, quantised, spill, told):
    assert any(told in one for one in objections(ptx, target, product, quantised, spill))
