"""The device build without CANN's compiler: launches are spelt as documented, and the script keeps what compiled."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
from deepinfer_ascend import npu_library

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels_ascendc"
PROBES = [KERNELS / f"twin/probes/probe_{name}.asc" for name in ("vector", "other", "reg", "math", "cube", "sync", "scalar")]
SOURCES = sorted(KERNELS.glob("*.asc")) + PROBES
BUILD = ROOT / "tools/ascend/build_npu.sh"
LAUNCH = re.compile(r"(\w+|\w+<[^()]*>)<<<\(uint32_t\)\(.*?\), 0, \(aclrtStream\)\(stream\)>>>\(", re.DOTALL)


@pytest.fixture(scope="module")
def headers(tmp_path_factory) -> Path:
    """Empty stand-ins for the two headers of CANN that sources include."""
    folder = tmp_path_factory.mktemp("cann")
    (folder / "acl").mkdir()
    for name in ("acl/acl.h", "kernel_operator.h"):
        (folder / name).write_text("")
    return folder


def expanded(source: Path, headers: Path) -> str:
    """The source after the preprocessor, from its own first line on."""
    folders = (headers, KERNELS / "npu/include", KERNELS, source.parent, ROOT / "hal/include")
    command = ["g++", "-E", "-P", "-x", "c++", "-std=c++17", *(f"-I{folder}" for folder in folders), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_launch_becomes_the_documented_syntax_with_a_bare_kernel_name(source, headers):
    text = expanded(source, headers)
    launches = [match.group(1) for match in LAUNCH.finditer(text)]
    assert "DI_LAUNCH" not in text and len(launches) == text.count("<<<") > 0
    kernels = set(re.findall(r"__global__[^;{]*?\bvoid\s+(\w+)\s*\(", text))
    assert {name.partition("<")[0] for name in launches} <= kernels
    assert "twin::" not in text


@pytest.mark.parametrize("symbol", ["di_rms_norm", "di_linear", "di_sample"])
def test_the_device_build_exports_the_symbols_of_the_twin(symbol, headers):
    texts = (expanded(source, headers) for source in SOURCES if f"{symbol}(" in source.read_text(encoding="utf-8"))
    assert any(re.search(rf'extern "C" __attribute__\(\(visibility\("default"\)\)\) int {symbol}\(', text) for text in texts)


def build(tmp_path: Path, broken: str = "", *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with a compiler that makes empty files, and refuses sources whose name has `broken`."""
    compiler = tmp_path / "bisheng"
    compiler.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/commands
case "$*" in
  --version) echo "BiSheng of a test"; exit ;;
  *{broken or "nothing"}.asc*-o*) echo "x.asc:1: error: no"; exit 1 ;;
esac
for last; do :; done
: > "$last"
"""
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "cann").mkdir(exist_ok=True)
    (tmp_path / "cann/version.cfg").write_text("Version=[9.2.0]\n")
    environment = {
        **os.environ, "BISHENG": str(compiler), "NPU_BUILD": str(tmp_path / "build"), "NPU_DESTINATION": str(tmp_path / "out"),
        "ASCEND_HOME_PATH": str(tmp_path / "cann"),
    }  # fmt: skip
    return subprocess.run([str(BUILD), *arguments], capture_output=True, text=True, check=False, env=environment)


def test_the_library_is_described_with_its_architecture_and_toolkit(tmp_path):
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out/libdeepinfer_npu.json").read_text())
    assert (told["architecture"], told["cann"], told["failed"]) == ("dav-3510", "9.2.0", [])
    assert told["compiler"] == "BiSheng of a test" and told["sources"] == npu_library.sources_digest()
    commands = (tmp_path / "commands").read_text()
    assert "-x asc --npu-arch=dav-3510" in commands


def test_a_source_that_does_not_compile_is_named_and_the_others_are_kept(tmp_path):
    done = build(tmp_path, broken="rms_norm")
    assert done.returncode == 1 and "FAILED rms_norm: x.asc:1: error: no" in done.stdout
    told = json.loads((tmp_path / "out/libdeepinfer_npu.json").read_text())
    assert told["failed"] == ["rms_norm"] and (tmp_path / "out/libdeepinfer_npu.so").exists()
    link = next(line for line in (tmp_path / "commands").read_text().splitlines() if "-shared" in line)
    assert "/rope.o" in link and "/rms_norm.o" not in link


def test_nothing_compiles_without_a_compiler_and_it_says_what_to_install(tmp_path):
    environment = {**os.environ, "BISHENG": str(tmp_path / "none")}
    done = subprocess.run([str(BUILD)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and "install CANN's toolkit (9.0 or later)" in done.stderr


def test_a_dry_run_prints_the_commands_and_makes_nothing(tmp_path):
    done = build(tmp_path, "", "--dry-run", "--npu-arch=dav-3510")
    assert done.returncode == 0 and not (tmp_path / "build").exists() and not (tmp_path / "commands").exists()
    assert done.stdout.count(" -c ") == len(list(KERNELS.glob("*.asc")))


def test_each_probe_is_a_library_of_its_own_and_one_that_fails_takes_no_other_along(tmp_path):
    listed = tmp_path / "builds"
    rows = [
        ("probe_vector-kAdd-float", "kernels_ascendc/twin/probes/probe_vector.asc", "-DPROBE_ONE=kAdd", "-DPROBE_TYPE=float"),
        ("probe_cube-x", "kernels_ascendc/twin/probes/probe_cube.asc", "-DPROBE_CUBE=half, half, float, false"),
    ]
    listed.write_text("".join("\t".join(row) + "\n" for row in rows))
    done = build(tmp_path, "", f"--probes={listed}")
    assert done.returncode == 0 and "probes: 2 of 2 compiled" in done.stdout, done.stdout + done.stderr
    assert "-DPROBE_CUBE=half, half, float, false" in (tmp_path / "commands").read_text()
    done = build(tmp_path, "probe_cube", f"--probes={listed}")
    assert done.returncode == 1 and "FAILED probe_cube-x: x.asc:1: error: no" in done.stdout
    assert [path.name for path in (tmp_path / "build/probes").glob("*.so")] == ["probe_vector-kAdd-float.so"]
