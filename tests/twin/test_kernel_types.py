"""clang's check of the kernels with real address spaces, and mutants that it must reject. It needs a package index once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools" / "ascend"), str(ROOT / "tools")]
import check_kernels  # noqa: E402

pytestmark = [pytest.mark.index, pytest.mark.timeout(300)]
MUTANTS = {
    "a gm pointer handed as ubuf": ("(__gm__ X*)args.x);", "(__ubuf__ X*)args.x);", "SetGlobalBuffer"),
    "a gm scalar bound to a reference": ("Muls(row, row, scale,", "Muls(row, row, *(__gm__ float*)args_.x,", "Muls"),
    "a host function called": ("const float scale =", "const float scale = DiMin(1, 2) +", "DiMin"),
    "a wrong template argument": ("TQue<TPosition::VECIN, 2> in_", "TQue<HardEvent::V_S, 2> in_", "HardEvent"),
    "operands of two types": ("Mul(square, row, row,", "Mul(square, raw, row,", "Mul"),
    "a tensor of another type": ("weight_in_.template DeQue<W>()", "weight_in_.template DeQue<half>()", "="),
    "a launch with a wrong argument": ("else DI_LAUNCH((rms_norm_kernel<float, float, float>), blocks, stream, args);",
                                       "else DI_LAUNCH((rms_norm_kernel<float, float, float>), blocks, stream, e);",
                                       "DiCall"),
    "an identifier that no page has": ("Sqrt(sum, sum, 8);", "SquareRoot(sum, sum, 8);", "SquareRoot"),
}  # fmt: skip


@pytest.fixture(scope="module")
def clang():
    with check_kernels.Clang() as made:
        yield made


def test_every_kernel_and_probe_passes_with_real_address_spaces():
    assert [str(finding) for finding in check_kernels.check(check_kernels.sources())] == []


@pytest.mark.parametrize("what", MUTANTS)
def test_a_mutant_is_rejected_at_its_line(clang, tmp_path, what):
    old, new, told = MUTANTS[what]
    text = (check_kernels.KERNELS / "rms_norm.asc").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "rms_norm.asc").write_text(text.replace(old, new), encoding="utf-8")
    line = text[: text.index(old)].count("\n") + 1
    found = [finding for finding in clang.check(tmp_path / "rms_norm.asc") if finding.path.name == "rms_norm.asc"]
    assert any(told in finding.text for finding in found), found
    assert line in {finding.line for finding in found}


def test_a_mistake_in_a_template_is_found_because_launches_instantiate_it(clang, tmp_path):
    source = '#include "di_kernel.h"\nusing namespace AscendC;\n'
    source += "template <class T> __global__ __vector__ void k(__gm__ T* x) { GlobalTensor<T> g; g.SetGlobalBuffer(T(0)); }\n"
    (tmp_path / "never.asc").write_text(source, encoding="utf-8")
    assert clang.check(tmp_path / "never.asc") == []
    source += "void run(void* s, float* x) { DI_LAUNCH((k<float>), 1, s, x); }\n"
    (tmp_path / "launched.asc").write_text(source, encoding="utf-8")
    assert {finding.line for finding in clang.check(tmp_path / "launched.asc")} == {3}
