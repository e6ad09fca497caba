"""CUDA C++ kernels without a GPU: what spills is refused, objects are kept under their key, a library says what it is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deepinfer_cuda import kernels, native, native_library
from deepinfer_cuda.gpu import Gpu
from deepinfer_cuda.kernel_sources import ARCHITECTURE, sources_digest
from deepinfer_hal.kernel import Kernel

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools/cuda"
sys.path.insert(0, str(TOOLS))

import checked_nvcc  # noqa: E402
import ptxas_report  # noqa: E402

NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH; it comes with the CUDA toolkit")

SAID = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5cleanPf' for 'sm_90a'
ptxas info    : Function properties for _Z5cleanPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compiling entry function '_Z6spillsPf' for 'sm_90a'
ptxas info    : Function properties for _Z6spillsPf
    48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 168 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z7indexesPf' for 'sm_90a'
ptxas info    : Function properties for _Z7indexesPf
    256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""

CLEAN = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n"
INDEXES = """__global__ void indexes(float* x, int n) {
  float kept[64] = {};
  for (int i = 0; i < n; ++i) kept[i * n & 63] += x[i];
  x[threadIdx.x] = kept[n & 63];
}
"""


def test_registers_shared_memory_spills_and_stacks_are_read_from_what_ptxas_says():
    clean, spills, indexes = ptxas_report.read_ptxas(SAID)
    assert (clean.name, clean.architecture, clean.registers, clean.shared_bytes) == ("_Z5cleanPf", "sm_90a", 24, 2048)
    assert clean.objection is None
    assert spills.objection == "spills 40 bytes a thread and loads 44" and spills.registers == 168
    lost = "(C7511) Potential Performance Loss: wgmma instructions are serialized due to registers in the function '_Z5cleanPf'"
    (clean, *_) = ptxas_report.read_ptxas(f"{lost}\n{SAID}")
    assert clean.objection == "loses speed: wgmma instructions are serialized due to registers"
    assert indexes.objection == "keeps 256 bytes a thread in local memory"


def compile_checked(source: Path, folder: Path, *flags: str) -> tuple[int, str, Path]:
    """Exit status, what was said, and the object."""
    made = folder / "made.o"
    command = [NVCC, "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", *flags, "-c", str(source), "-o", str(made)]
    environment = {**os.environ, "DEEPINFER_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, str(TOOLS / "checked_nvcc.py"), *command], env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, made


@needs_nvcc
def test_a_kernel_that_indexes_local_memory_is_refused_by_name_and_leaves_no_object(tmp_path):
    source = tmp_path / "indexes.cu"
    source.write_text(INDEXES)
    status, said, made = compile_checked(source, tmp_path)
    told = said.replace("float *", "float*")  # demanglers differ
    assert status == 1 and "indexes.cu: error: kernel indexes(float*, int) keeps 256 bytes a thread in local memory" in told
    assert not made.exists()


@needs_nvcc
def test_an_object_is_kept_under_its_source_and_arguments_and_another_source_is_compiled_anew(tmp_path):
    source = tmp_path / "twice.cu"
    source.write_text(CLEAN)
    assert compile_checked(source, tmp_path)[0] == 0
    made = tmp_path / "made.o"
    first = made.read_bytes()
    made.unlink()
    status, said, _ = compile_checked(source, tmp_path)
    assert status == 0 and "as it was built before" in said and made.read_bytes() == first
    assert json.loads((tmp_path / "made.o.ptxas.json").read_text())[0]["architecture"] == ARCHITECTURE
    source.write_text(CLEAN.replace("2;", "3;"))
    status, said, _ = compile_checked(source, tmp_path)
    assert status == 0 and "built before" not in said and made.read_bytes() != first


def test_the_key_depends_on_architecture_flags_source_and_headers_but_not_on_where_the_object_goes(tmp_path, monkeypatch):
    source, header = tmp_path / "a.cu", tmp_path / "a.cuh"
    source.write_text(CLEAN)
    header.write_text("")
    monkeypatch.setattr(checked_nvcc, "HEADERS", (header,))

    def key(*flags, out="x.o"):
        return checked_nvcc._key([sys.executable, *flags, "-c", str(source), "-o", out], source)

    keys = {key("-arch=sm_90a"), key("-arch=sm_100a"), key("-arch=sm_90a", "-O1")}
    assert len(keys) == 3 and key("-arch=sm_90a", out="y.o") in keys
    header.write_text("#define NEW")
    assert key("-arch=sm_90a") not in keys


# ------------------------------------------------------------------------------------------ what a library says of itself


@pytest.fixture
def library(tmp_path):
    """A library file with its description."""
    path = tmp_path / "libdeepinfer_cuda.so"
    path.write_bytes(b"")
    sources = sources_digest(ROOT / "kernels_cuda")
    told = {"architecture": ARCHITECTURE, "nvcc": "13.0.88", "sources": sources, "kernels": {"a": {}}}
    path.with_suffix(".json").write_text(json.dumps(told))
    return path


def test_the_library_is_told_with_its_architecture_compiler_and_sources(library):
    part = native_library.part(library)
    assert part.ok and part.found == (
        f"sm_90a, 1 kernels built with nvcc 13.0.88 from sources {sources_digest(ROOT / 'kernels_cuda')}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told", "ok"),
    [
        ({"sources": "0" * 16}, "which are not those beside it: build it again", True),
        ({"architecture": "sm_100a"}, "sm_100a", False),
        ({"kernels": None}, "kernels", True),
    ],
)
def test_what_is_not_as_it_should_be_is_said(library, change, told, ok):
    described = json.loads(library.with_suffix(".json").read_text())
    if change == {"kernels": None}:
        del described["kernels"]
        told, ok = "does not say what the kernel library is", False
    library.with_suffix(".json").write_text(json.dumps({**described, **change} if "kernels" in described else described))
    part = native_library.part(library)
    assert told in part.found and part.ok is ok


def test_without_a_library_the_reason_that_the_build_left_is_told(tmp_path, monkeypatch):
    note = tmp_path / "cuda_not_built.txt"
    note.write_text("no nvcc was found when the package was built\n")
    monkeypatch.setattr(native_library, "NOT_BUILT", note)
    part = native_library.part(tmp_path / "absent.so")
    assert not part.ok and part.found == "none (no nvcc was found when the package was built)"


def test_the_digest_follows_every_file_that_is_compiled(tmp_path):
    folder, header = tmp_path / "kernels_cuda", tmp_path / "hal/include/deepinfer/hal.h"
    folder.mkdir()
    header.parent.mkdir(parents=True)
    digests = set()
    for path in (header, folder / "a.cu", folder / "a.cuh", folder / "b.cu"):
        path.write_text("1")
        header.touch()
        digests.add(sources_digest(folder))
    assert len(digests) == 4


# ---------------------------------------------------------------------------------------------------- priority


def test_on_hopper_cuda_cpp_comes_before_triton_and_other_gpus_never_see_it(monkeypatch):
    mine = Kernel("rms_norm", "cuda", print, "di_rms_norm", "yes", priority=native.PRIORITY)
    portable = Kernel("rms_norm", "triton", print, "triton::rms_norm", "yes", priority=50)
    monkeypatch.setattr(native, "library", lambda device: pytest.fail("no library is loaded on another architecture"))
    assert native.kernels((10, 0), None) == []
    monkeypatch.setattr(native, "kernels", lambda capability, device: [mine] if capability == (9, 0) else [])
    monkeypatch.setattr(kernels, "_portable", lambda found: [portable])
    monkeypatch.setattr(kernels.torch.cuda, "device_count", lambda: 1)
    hopper, blackwell = (kernels.kernels_of(Gpu(0, "GPU", 1, capability, 1)) for capability in ((9, 0), (10, 0)))
    assert [kernel.symbol for kernel in hopper] == ["di_rms_norm", "triton::rms_norm"] and hopper[0].priority > hopper[1].priority
    assert [kernel.symbol for kernel in blackwell] == ["triton::rms_norm"]


# ---------------------------------------------------------------------------------------------------- every kernel


@needs_nvcc
@pytest.mark.parametrize("source", sorted((ROOT / "kernels_cuda").glob("*.cu")), ids=lambda path: path.stem)
def test_every_kernel_assembles_for_hopper_without_spills_and_exports_its_op(source, tmp_path):
    flags = ("-O3", "-std=c++17", "-Xcompiler=-fPIC", f"-I{ROOT / 'kernels_cuda'}", f"-I{ROOT / 'hal/include'}")
    status, said, made = compile_checked(source, tmp_path, *flags)
    assert status == 0, said
    symbols = subprocess.run(["nm", "-C", str(made)], capture_output=True, text=True, check=True).stdout
    assert f" T di_{source.stem}\n" in symbols, "an op's kernel is in the file of its name"
