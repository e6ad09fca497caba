"""The bring-up's probes: what they cover, how a chip's answers are judged, and what happens when one fails or dies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools/ascend")]

import probe_cases  # noqa: E402
import probes as support  # noqa: E402
import run_probes  # noqa: E402
from probe_kernels import Probe, image  # noqa: E402

pytestmark = pytest.mark.skipif(support.missing() is not None, reason=str(support.missing()))
FIRST = ["vector.Add.float", "vector.Sub.float", "vector.Mul.float"]


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("probes") / "probes.npz"
    run_probes.write(path, run_probes.expect())
    return path


def test_the_instructions_of_the_kernels_are_asked_about(archive):
    stored = run_probes.read(archive)
    covered = {name for _, _, ran in stored.values() for name in ran}
    assert len(covered) >= 100
    assert {"SetFlag", "SyncAll", "DataCopyPad", "Nd2Nz", "LoadData", "Mmad", "MmadMx", "Fixpipe", "Cast", "RegCast"} <= covered
    assert len(stored) == len(probe_cases.probes())  # names are unique


def test_the_archive_gives_back_the_calls_and_the_twin_repeats_itself(archive):
    stored = run_probes.read(archive)
    for made in probe_cases.probes()[::20]:
        kept, expected, _ = stored[made.name]
        assert all(np.array_equal(a, b) for a, b in zip(kept.tensors, made.tensors, strict=True))
        fields = ("kernel", "out", "integers", "reals", "view", "units", "defines", "library")
        assert all(getattr(kept, field) == getattr(made, field) for field in fields)
        assert expected.nbytes == made.tensors[made.out].nbytes and not np.array_equal(expected, made.tensors[made.out])


def probe(view: str, units: int | None) -> Probe:
    return Probe("a", "probe_vector", (np.zeros(0, np.uint8),), 0, (), view=view, units=units)


@pytest.mark.parametrize(
    ("view", "units", "expected", "got", "verdict"),
    [
        ("float", 0, [1.0, np.nan], [1.0, -np.nan], "equal"),
        ("float", 1, [1.0, 2.0], [np.nextafter(np.float32(1), np.float32(2)), 2.0], "within"),
        ("float", 0, [1.0, 2.0], [np.nextafter(np.float32(1), np.float32(2)), 2.0], "differs"),
        ("float", 1, [1.0], [np.nan], "differs"),
        ("float", 1, [0.0], [-0.0], "equal"),
        ("float", None, [1.0], [3.0], "told"),
        ("half", 2, [1.0], [1.002], "within"),
        ("bfloat16_t", 1, [1.0], [1.02], "differs"),
        ("int32_t", 0, [7], [8], "differs"),
        ("uint8_t", 0, [255], [0], "differs"),
    ],
)
def test_answers_are_judged_by_what_the_pages_allow(view, units, expected, got, verdict):
    kind = {"bfloat16_t": ml_dtypes.bfloat16}.get(view) or run_probes.TYPES[view][1]
    found = run_probes.judge(probe(view, units), *(image(np.array(values, kind)) for values in (expected, got)))
    assert found["verdict"] == verdict


def test_the_first_place_that_differs_is_told():
    a, b = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.float32)
    b[[3, 5]] = [9, 9]
    found = run_probes.judge(probe("float", 0), image(a), image(b))
    assert (found["different"], found["of"], found["first"], found["expected"], found["got"]) == (2, 8, 3, "3.0", "9.0")


def library(folder: Path, name: str, body: str) -> None:
    """A device library of the test's own: what a chip that is not the twin does."""
    source = folder / "x.c"
    includes = "".join(f"#include {name}\n" for name in ('"deepinfer/hal.h"', "<stdlib.h>", "<string.h>", "<unistd.h>"))
    parameters = "const di_tensor* t, int n, const di_params* p, void* s, void* w, size_t b, di_error* e"
    source.write_text(f"{includes}int di_probe_vector({parameters}) {{ {body} }}\n")
    command = ["cc", "-shared", "-fPIC", f"-I{ROOT}/hal/include", "-o", str(folder / f"{name}.so"), str(source)]
    subprocess.run(command, check=True)


def test_one_that_fails_dies_or_was_not_built_is_told_and_the_others_go_on(archive, tmp_path):
    fails = 'strcpy(e->message, "error code is 507035"); return 3;'
    library(tmp_path, "probe_vector-kAdd-float", fails)
    library(tmp_path, "probe_vector-kSub-float", "abort();")
    library(tmp_path, "probe_vector-kMul-float", "return 0;")  # leaves y as it was
    names = [*FIRST, "vector.Div.float"]
    results = run_probes.compare(archive, "cpu", tmp_path, names)
    assert [result["verdict"] for result in results] == ["failed", "crashed", "differs", "not built"]
    assert "vector core failed" in run_probes._words(results[0]) and "ended with -6" in results[1]["message"]
    assert "Mul" in results[2]["instructions"] and results[2]["of"] == 192
    assert "as it was before the call" in run_probes._words(results[2])


def test_one_that_hangs_is_stopped(archive, tmp_path, monkeypatch):
    library(tmp_path, "probe_vector-kAdd-float", "sleep(60); return 0;")
    monkeypatch.setattr(run_probes, "PATIENCE_SECONDS", 1.0)
    (result,) = run_probes.compare(archive, "cpu", tmp_path, FIRST[:1])
    assert result["verdict"] == "hung"


def test_the_twin_agrees_with_itself_through_the_devices_binding(archive, tmp_path):
    report = tmp_path / "report.json"
    arguments = ["compare", str(archive), "--device", "twin", "--report", str(report)]
    assert run_probes.main(arguments) == 0
    told = json.loads(report.read_text())
    assert told["counts"] == {"equal": len(probe_cases.probes())}


NARROWED = ("vector.Muls.half", "other.Cast.float.bfloat16_t.RINT", "other.ReduceMax.float", "cube.bf16", "math.Ln")


@pytest.mark.parametrize("name", NARROWED)
def test_a_source_narrowed_to_one_instruction_is_still_one(name):
    (made,) = [one for one in probe_cases.probes() if one.name == name]
    folders = ("kernels_ascendc/twin/include", "kernels_ascendc", "hal/include")
    command = ["g++", "-fsyntax-only", "-x", "c++", "-std=c++17", *(f"-I{ROOT / folder}" for folder in folders)]
    source = ROOT / f"kernels_ascendc/twin/probes/{made.kernel}.asc"
    subprocess.run([*command, *(f"-D{define}" for define in made.defines), str(source)], check=True)
    assert re.fullmatch(rf"{made.kernel}(-\w+)+", made.library)
