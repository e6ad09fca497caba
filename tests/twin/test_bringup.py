"""The bring-up script: its steps run without an NPU through the same code, and a step that fails says what to send."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import probes
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/ascend/bringup.sh"
STEPS = "versions twin build probe-builds probes smoke conformance vendor-ops generate".split()

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))


def bring_up(out: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    command = [str(SCRIPT), f"--out={out}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_some_steps_without_an_npu(tmp_path):
    done = bring_up(tmp_path / "out", "--twin", "--steps=build,vendor-ops,generate")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "out/summary.txt").read_text()
    assert re.findall(r"^(\S+) +ok", summary, re.MULTILINE) == ["build", "vendor-ops"] and "generate     needs an NPU" in summary
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert {"out/build.log", "out/vendor-ops.log", "out/summary.txt"} <= set(archive.getnames())


def test_a_step_that_fails_names_its_log_and_what_to_send(tmp_path):
    done = bring_up(tmp_path / "out", "--device=0", "--steps=smoke")
    assert done.returncode == 1 and re.search(r"^smoke +FAILED", done.stdout, re.MULTILINE), done.stdout
    assert f"smoke: send {tmp_path}/out/smoke.log and" in done.stdout
    log = (tmp_path / "out/smoke.log").read_text()
    assert "has no device 0; it has 1000 (twin); `deepinfer hal list` says" in log and "Traceback" not in log


def test_an_interpreter_without_the_probes_packages_is_told_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ml_dtypes'] = None\n")
    done = bring_up(tmp_path / "out", "--twin", "--steps=versions", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "pip install ml_dtypes" in (tmp_path / "out/versions.log").read_text()


@pytest.mark.parametrize("tool", ["bench_twin.py", "check_torch_npu.py", "estimate.py", "mutate.py"])
def test_tools_of_the_pages_need_no_installed_package(tool):
    """They find the checkout by themselves, as the pages show them."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "tools/ascend" / tool), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT.parent)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_probes_without_what_is_expected_say_which_step_writes_it(tmp_path):
    done = bring_up(tmp_path / "out", "--twin", "--steps=probes")
    log = (tmp_path / "out/probes.log").read_text()
    assert done.returncode == 1 and "probes.npz is absent" in log and "step `twin`" in log and "Traceback" not in log


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_step_without_an_npu(tmp_path):
    done = bring_up(tmp_path / "out", "--twin")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r" ok ", (tmp_path / "out/summary.txt").read_text())) == len(STEPS) - 1


def test_the_page_has_a_row_for_every_step():
    page = (ROOT / "docs/ascend-bringup.md").read_text(encoding="utf-8")
    script = SCRIPT.read_text(encoding="utf-8")
    assert all(f"\n| {step} | " in page for step in STEPS) and f"steps={','.join(STEPS)}" in script
