"""The linter and the manifest on the kernels as they are, and on sources with one thing wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "ascend"))
import api_manifest  # noqa: E402
from kernel_source import kernel_files, parse, probe_files, read  # noqa: E402
from lint_kernels import RULES, lint  # noqa: E402

GOOD = """
#include "di_kernel.h"
using namespace AscendC;
namespace {
constexpr int32_t kPiece = 64;
struct Args { __gm__ float *x, *y; int32_t items; };
template <class T> class Copier {
 public:
  __aicore__ void Run(const Args& a) {
    pipe_.InitBuffer(buffer_, kPiece * 4);
    LocalTensor<T> tile = buffer_.Get<T>();
    GlobalTensor<T> x;
    x.SetGlobalBuffer(a.x);
    LoadRow(tile, x, a.items);
    Muls(tile, tile, 2.0f, a.items);
  }
 private:
  __aicore__ float Half(float x) { return 0.5f * x; }
  TPipe pipe_;
  TBuf<TPosition::VECCALC> buffer_;
};
__global__ __vector__ void copy_kernel(Args a) {
  Copier<float> copier;
  copier.Run(a);
}
int Blocks(int items) { return items; }
}  // namespace
DI_EXPORT int di_copy(const di_tensor* t, int n, const di_params* p, void* stream, void*, size_t, di_error* e) {
  Args args{(float*)t[0].data, (float*)t[1].data, 64};
  DI_LAUNCH(copy_kernel, Blocks(1), stream, args);
  return di_finish(stream, e);
}
"""
STATIC = """
#include "di_kernel.h"
using namespace AscendC;
__global__ __vector__ void square_kernel(__gm__ float* x) {
  InitSocState();
  LocalTensor<float> tile(TPosition::VECCALC, 0, 64), other(TPosition::VECCALC, 256, 64);
  static constexpr int32_t kItems = 64;
  Mul(tile, tile, other, kItems);
  PipeBarrier<PIPE_ALL>();
}
"""
MUTANTS = [
    ("host-call", "return 0.5f * x;", "return sqrtf(x);"),
    ("host-call", "return 0.5f * x;", "return Blocks(1) * x;"),
    ("host-call", "LoadRow(tile, x, a.items);", 'printf("%d", a.items);'),
    ("host-call", "Muls(tile, tile, 2.0f, a.items);", "Sinh<float>(tile, tile, a.items);"),
    ("std", "return 0.5f * x;", "return std::max(0.5f, x);"),
    ("std", '#include "di_kernel.h"', '#include "di_kernel.h"\n#include <algorithm>'),
    ("static-data", "float Half(float x) {", "float Half(float x) { static int calls = 0;"),
    ("static-data", "constexpr int32_t kPiece = 64;", "int32_t kPiece = 64;"),
    ("static-data", "constexpr int32_t kPiece = 64;", "const int32_t kSizes[2] = {64, 32}; constexpr int32_t kPiece = 64;"),
    ("exception", "return 0.5f * x;", "if (x < 0.0f) throw x; return x;"),
    ("heap", "return 0.5f * x;", "return *new float(x);"),
    ("intrinsic", "return 0.5f * x;", "return __builtin_fabsf(x);"),
    ("intrinsic", "LoadRow(tile, x, a.items);", "asc_copy_gm2ub(tile, x, a.items);"),
    ("intrinsic", "LoadRow(tile, x, a.items);", "set_flag(0, 1, 2);"),
    ("recursion", "return 0.5f * x;", "return x < 1.0f ? x : Half(0.5f * x);"),
    ("virtual", "__aicore__ float Half", "virtual __aicore__ float Half"),
    ("double", "return 0.5f * x;", "return 0.5 * x;"),
    ("double", "return 0.5f * x;", "return x * 1e-3;"),
    ("double", "return 0.5f * x;", "double wide = x; return wide;"),
    ("mixed-memory", "LocalTensor<T> tile = buffer_.Get<T>();", "LocalTensor<T> tile(TPosition::VECCALC, 0, 64);"),
    ("launch", "DI_LAUNCH(copy_kernel, Blocks(1), stream, args);", "copy_kernel<<<1, nullptr, stream>>>(args);"),
    ("launch", "DI_LAUNCH(copy_kernel, Blocks(1), stream, args);", "copy_kernel(args);"),
    ("launch", "copier.Run(a);", "copier.Run(a); copy_kernel(a);"),
]


def findings_of(*texts: str) -> list:
    shared = [read(path) for path in kernel_files() if path.suffix == ".h"]
    files = [parse(text, Path(f"kernel{number}.asc")) for number, text in enumerate(texts)]
    return [finding for finding in lint([*shared, *files]) if finding.file.endswith(".asc")]


def test_the_kernels_and_the_probes_of_the_bring_up_have_no_findings():
    assert [str(finding) for finding in lint([read(path) for path in (*kernel_files(), *probe_files())])] == []


def test_sources_without_a_fault_have_no_findings():
    assert findings_of(GOOD, STATIC) == []


@pytest.mark.parametrize(("rule", "old", "new"), MUTANTS)
def test_each_fault_is_found_at_its_line_by_its_rule(rule, old, new):
    assert GOOD.count(old) == 1
    text = GOOD.replace(old, new)
    changed = {number for number, (a, b) in enumerate(zip(GOOD.splitlines(), text.splitlines(), strict=False), 1) if a != b}
    found = [finding for finding in findings_of(text) if finding.rule == rule]
    assert found, f"no finding of {rule}"
    if rule not in ("mixed-memory", "recursion"):  # these two name the kernel and the function
        assert {finding.line for finding in found} & changed


@pytest.mark.parametrize("line", ["  InitSocState();\n", "  PipeBarrier<PIPE_ALL>();\n"])
def test_a_kernel_that_places_tensors_itself_begins_and_ends_as_its_page_says(line):
    assert [finding.rule for finding in findings_of(STATIC.replace(line, ""))] == ["soc-state"]


def test_every_rule_has_a_mutant():
    assert {rule for rule, *_ in MUTANTS} | {"soc-state"} == set(RULES)


def test_a_fault_in_a_macro_or_behind_a_comment_is_still_found():
    text = GOOD.replace("#include", "#define HALF(x) \\\n  ((x) * 0.5)\n#include", 1)
    assert [finding.rule for finding in findings_of(text)] == ["double"]
    assert findings_of(GOOD.replace("return 0.5f * x;", "return 0.5f * x;  // std::sin(0.5) new double")) == []


def test_the_manifest_names_every_identifier_and_nothing_more():
    assert api_manifest.problems(api_manifest.load(), *api_manifest.sources()) == []


def test_every_entry_has_a_signature_a_page_and_a_grade():
    for entry in api_manifest.load():
        assert entry.declaration and entry.grade in api_manifest.GRADES
        assert entry.url.startswith("https://"), entry.name


def test_an_identifier_outside_of_the_manifest_and_an_unused_entry_are_told():
    entries, (kernels, probes) = api_manifest.load(), api_manifest.sources()
    mutant = parse("namespace { void f() { AscendC::Gelu(a, b, 8); AscendC::Reg::Sub(d, a, b, m); } }", Path("mutant.asc"))
    told = api_manifest.problems(entries, [*kernels, mutant], probes)
    assert any("mutant.asc:1: Gelu is not in the manifest: add it" in one for one in told)
    without = [source for source in kernels if "Mmad" not in api_manifest.uses(source)]
    assert len(without) < len(kernels)
    told = api_manifest.unused(entries, set().union(*(api_manifest.uses(source) for source in without)))
    assert any("nothing uses Mmad;" in one for one in told)
