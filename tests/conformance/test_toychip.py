"""The toy chip: memory that the host cannot touch, ops that fall to nothing, and the first three rungs of the ladder."""

import json
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deepinfer.model_path import PACKAGED_MODELS, packaged_models
from deepinfer.porting import backend_lines
from tests.conformance.toychip_site import PIP_INSTALL, ROOT, SOURCE, environment, require_compiler, run_python, toychip_site
from tests.unit.porting_doc import commands

TINY = ROOT / "tests" / "oracle" / "tiny"
PORTER_LINES = 60


@pytest.fixture(scope="module")
def site() -> Path:
    require_compiler()
    return toychip_site()


def run(code: str, site: Path) -> str:
    """Output of a program that must end well."""
    done = run_python(code, site)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_host_faults_where_it_touches_a_device_address(site):
    code = "import ctypes, torch, toychip\nt = torch.zeros(4, device='toychip')\nctypes.c_char.from_address(t.data_ptr()).value"
    assert run_python(code, site).returncode == -signal.SIGSEGV


def test_memory_is_given_back(site):
    code = """
import torch, toychip
from deepinfer_toychip.native import memory_info
before = memory_info()[0]
kept = [torch.zeros(1000 + i, device="toychip") for i in range(50)]
assert memory_info()[0] < before
del kept
assert memory_info()[0] == before
try:
    torch.zeros(1 << 40, dtype=torch.uint8, device="toychip")
except torch.OutOfMemoryError as error:
    print(error)
"""
    assert "do not fit into the chip's memory" in run(code, site)


def test_an_op_outside_the_list_and_a_host_tensor_among_device_tensors_raise(site):
    code = """
import torch, toychip
device, host = torch.ones(2, 2, device="toychip"), torch.zeros(2, dtype=torch.int64)
for wrong in (lambda: torch.linalg.det(device), lambda: device[host], lambda: device + host):
    try:
        wrong()
    except (NotImplementedError, RuntimeError) as error:
        print(str(error).splitlines()[0])
"""
    printed = run(code, site)
    assert "toychip has no kernel for aten::" in printed
    assert "got a host tensor of shape [2]; copy it to the chip first" in printed
    assert "on the same device" in printed


def test_the_chip_has_the_ops_of_the_floor_and_what_torch_makes_of_them():
    def names(path):
        return [line for line in path.read_text(encoding="ascii").splitlines() if line and not line.startswith("#")]

    floor, listed = names(ROOT / "hal" / "ATEN_FLOOR.txt"), names(SOURCE / "toychip" / "aten_ops.txt")
    assert listed[: len(floor)] == floor, "copy hal/ATEN_FLOOR.txt into examples/toychip/toychip/aten_ops.txt"
    assert len(listed) - len(floor) <= 8


def test_the_first_three_rungs_are_reached_and_the_others_are_not(site):
    command = [sys.executable, "-m", "deepinfer", "hal", "ladder", "--backend", "toychip", "--json"]
    done = subprocess.run(command, env=environment(site), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rungs = json.loads(done.stdout)["rungs"]
    assert [rung["reached"] for rung in rungs] == [True, True, True, False, False, False], rungs
    assert any("falls to the reference" in missing for missing in rungs[-1]["missing"])


def test_kernels_and_references_score_like_the_cpu(site):
    """Through caches and chunks, every op checked against its card; float32 without rounding, so nothing may differ."""
    code = f"""
import numpy as np
from deepinfer.config import EngineConfig
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner

def score(backend, only_reference=False):
    config = EngineConfig.create(
        model={str(TINY)!r}, backend=backend, dtype="float32", act_quant="none", kv_cache_dtype="float32", max_model_len=256,
        max_num_seqs=2, max_num_batched_tokens=64, debug_checks=True,
    )
    return Runner(load(config, only_reference=only_reference)).score(np.arange(3, 100) % 300, 17)

expected = score("cpu", True)
print(np.abs(score("toychip") - expected).max(), np.abs(score("toychip", True) - expected).max())
"""
    kernels, references = map(float, run(code, site).split())
    assert kernels < 1e-4 and references < 1e-4


def test_seeded_samples_log_probabilities_and_drafts_are_those_of_the_cpu(site):
    code = f"""
import numpy as np
from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig
from deepinfer.runner.debug import DebugSession
from deepinfer.runner.runner import Runner

settings = dict(dtype="float32", act_quant="none", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64)
def results(backend):
    llm = LLM({str(TINY)!r}, backend=backend, **settings)
    more = dict(presence_penalty=0.5, logprobs=2, prompt_logprobs=1)
    params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3, **more)
    texts = [choice.outputs[0].token_ids for choice in llm.generate(["def main():", "import os"], params, use_tqdm=False)]
    config = EngineConfig.create(model={str(TINY)!r}, backend=backend, **settings)
    session = DebugSession(Runner.from_config(config, with_draft=True))
    session.run(np.arange(3, 60) % 300)
    return texts, session.draft(56, 7).tokens.cpu().tolist()

assert results("cpu") == results("toychip")
"""
    run(code, site)


def test_the_same_kernels_are_right_from_host_memory_over_the_c_runtime_alone(site):
    code = f"""
import pathlib
import torch
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo
from deepinfer_hal.card import all_cards
from deepinfer_hal.host_memory import CRuntime, DeviceWeight, host_memory_kernels
from deepinfer_hal.ladder import check_op

site = pathlib.Path({str(site)!r})
names = dict(malloc="toychip_malloc", free="toychip_free", copy_in="toychip_copy_to_device", copy_out="toychip_copy_to_host")
runtime = CRuntime(site / "toychip" / "libtoychip.so", **names)
offered = host_memory_kernels(runtime, site / "deepinfer_toychip" / "libdeepinfer_toychip.so", "bare")

class Bare(Backend):
    name = "bare"
    def probe(self):
        return [DeviceInfo(0, "bare")]
    def device(self, index):
        return torch.device("cpu")
    def capabilities(self, index):
        return Capabilities()
    def kernels(self, index):
        return offered
    def prepare_weight(self, index, role, canonical):
        return DeviceWeight(runtime, role, canonical)

wrong = [check_op(Bare(), 0, all_cards()[kernel.op], own_kernel=True) for kernel in offered]
print(len(offered), [one for one in wrong if one])
"""
    assert run(code, site).strip() == "18 []"


@pytest.mark.parametrize("act_quant", ["none", "fp8_32"])
def test_the_chip_agrees_with_the_cpu_on_nano_along_its_greedy_tokens(site, act_quant):
    """The rule for two backends: argmax equal where the CPU's top-2 gap exceeds tau, and a mean KL of at most 1e-3.

    How often the gap exceeds tau is the checkpoint's affair, and stored with it. Where roundings alone (the CPU's kernels
    against its own references) give a larger KL than that, no second backend can be asked for a smaller one.
    """
    folder = PACKAGED_MODELS / "nano"
    if not (folder / "agreement.json").is_file():
        pytest.skip("the package carries no nano with agreement.json")
    stored = json.loads((folder / "agreement.json").read_text())
    code = f"""
import json
import numpy as np
from deepinfer.config import EngineConfig
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner

stored = json.load(open({str(folder / "agreement.json")!r}))
texts = [prompt + greedy for prompt, greedy in zip(stored["prompts"], stored["greedy"])]

def scores(backend, only_reference=False):
    config = EngineConfig.create(
        model="nano", backend=backend, act_quant={act_quant!r}, dtype={"float32" if act_quant == "none" else "auto"!r},
        max_model_len=512, max_num_seqs=1, max_num_batched_tokens=512,
    )
    runner = Runner(load(config, only_reference=only_reference))
    return np.concatenate([runner.score(text)[len(p) - 1 : -1] for text, p in zip(texts, stored["prompts"])])

cpu, chip, own = scores("cpu"), scores("toychip"), scores("cpu", True)
top = np.sort(cpu, 1)[:, -2:]
sure = top[:, 1] - top[:, 0] > {stored["tau"][act_quant]}
kl, own_kl = ((np.exp(cpu) * (cpu - other)).sum(1).mean() for other in (chip, own))
print(len(cpu), sure.mean(), (cpu.argmax(1) == chip.argmax(1))[sure].mean(), kl, own_kl)
"""
    positions, share, equal, divergence, rounding = map(float, run(code, site).split())
    assert positions == 8 * 64 and share >= stored["positions_above_tau"][act_quant] - 0.02
    assert equal == 1.0 and divergence <= max(1e-3, 1.25 * rounding)


# ------------------------------------------------------------------------------------------- docs/porting.md, followed

SHIMS = """
python() {{ "{python}" "$@"; }}
deepinfer() {{ "{python}" -m deepinfer "$@"; }}
pip() {{
  local package="${{!#}}"
  if [ "$package" = ./examples/toychip ]; then cp -r "{built}/." "{target}"; else "{python}" {install} "{target}" "$package"; fi
}}
"""


def test_the_porting_page_leads_from_hal_new_to_the_text_of_the_cpu(site, tmp_path):
    target, shims = tmp_path / "site", tmp_path / "shims.sh"
    target.mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = {"python": sys.executable, "built": site, "target": target, "install": " ".join(PIP_INSTALL)}
    shims.write_text(SHIMS.format(**words), encoding="utf-8")
    texts = {}
    for command in commands():
        printed = follow(command, shims, target, tmp_path)
        if command.startswith("deepinfer generate"):
            texts[command.split("--backend ")[1].split()[0]] = json.loads(printed)[0]["outputs"][0]["token_ids"]
    assert set(texts) == {"cpu", "mychip", "toychip", "barechip"}
    assert len(texts["cpu"]) > 0
    assert all(tokens == texts["cpu"] for tokens in texts.values()), texts
    for port in ("mychip", "barechip"):
        assert backend_lines(tmp_path / port) <= PORTER_LINES


def test_the_page_builds_beside_what_is_installed_wherever_a_build_wants_deepinfer():
    """No index has it, and the kernels fit the torch that they were compiled against; the shims above would hide that."""
    installs = [command.split() for command in commands() if command.startswith("pip install ./") or "isolation" in command]
    for words in installs:
        project = ROOT / words[-1] / "pyproject.toml"
        wanted = tomllib.loads(project.read_text())["build-system"]["requires"] if project.exists() else []
        assert "deepinfer" not in wanted or "--no-build-isolation" in words, " ".join(words)
    assert any(words[-1] == "./examples/toychip" for words in installs)


def follow(command: str, shims: Path, target: Path, folder: Path) -> str:
    """Runs one line of the page as a reader would; its output."""
    if "nano" not in packaged_models():
        command = command.replace("--model nano", f"--model {TINY} --dtype float32 --act-quant none")
    bash = [shutil.which("bash") or "bash", "-c", f'. "{shims}"; {command}']
    done = subprocess.run(bash, env=environment(target), cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout
