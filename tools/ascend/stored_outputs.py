"""Hashes of what the AscendC kernels write on the twin: small cases of every op, fixed inputs.

    python tools/ascend/stored_outputs.py                      prints the hashes as JSON
    python tools/ascend/stored_outputs.py --level base         ... at an instruction level: base, avx2 or avx512
    python tools/ascend/stored_outputs.py --module FILE.so     ... of another build of the twin
    python tools/ascend/stored_outputs.py --builds             builds the twin at -O0 and at -O3, the kernels too, and
                                                               compares both and every level with the installed one
    python tools/ascend/stored_outputs.py --builds --report reports/ascend/stored_outputs.json

A kernel's bits depend neither on how it was compiled nor on the machine's instructions. Exits 1 and names the cases that do.
An entry is `case: {inputs, outputs}`; inputs are hashed as well, since torch may draw others on another machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/ascend", "hal", "backends/ascend", "backends/cpu", ".")]

import torch  # noqa: E402
from ascend_venvs import build_python  # noqa: E402
from deepinfer_ascend import twin  # noqa: E402
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend  # noqa: E402
from deepinfer_hal.card import Case, OpCard, get_card  # noqa: E402
from report import store  # noqa: E402

COMMAND = "python tools/ascend/stored_outputs.py --builds --report reports/ascend/stored_outputs.json"
LEVELS = ("base", "avx2", "avx512")
SEED = 11
CASES = 4
"""Cases of an op, the first that have rows."""
BUILDS = {"-O0": ("-O0", "-O0"), "-O3": ("-O3", "-O3")}
"""Optimisation of the twin and of the kernels."""


def ops() -> list[str]:
    """Ops whose kernel runs on one rank."""
    return [op for op in twin.ops() if "comm" not in get_card(op).arg_names]


def first_cases(card: OpCard) -> list[Case]:
    """The first cases that have rows."""
    sizes = ("T", "M", "S", "R", "rows")
    full = (case for case in card.enumerate_cases() if 0 not in [case.params.get(key, 1) for key in sizes])
    return list(itertools.islice(full, CASES))


def _digest(tensors: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def entry(card: OpCard, case: Case) -> dict[str, str]:
    """Runs a case and hashes its tensors before the call and what it wrote."""
    args = card.generate(case, SEED, "cpu", lambda role, canonical: AscendBackend().prepare_weight(TWIN_INDEX, role, canonical))
    inputs = _digest([value for value in args.values() if isinstance(value, torch.Tensor)])
    twin.bind(card)(**args, stream=twin.module().Stream(cores=8, seed=3))
    written = [args[arg.name] for arg in card.signature if arg.kind in ("out", "inout")]
    return {"inputs": inputs, "outputs": _digest([tensor for tensor in written if tensor is not None])}


def hashes(level: str | None = None) -> dict[str, dict[str, str]]:
    """The entries of all ops at an instruction level, by default the best of this machine."""
    module = twin.module()
    before = module.level()
    if level is not None and module.set_level(level) != level:
        raise ValueError(f"this machine has no level {level}, only {module.level()}")
    try:
        cards = [get_card(op) for op in ops()]
        return {case.id: entry(card, case) for card in cards for case in first_cases(card)}
    finally:
        module.set_level(before)


def levels() -> list[str]:
    """Levels that this machine and this build have."""
    module = twin.module()
    before = module.level()
    found = [level for level in LEVELS if module.set_level(level) == level]
    module.set_level(before)
    return found


def differences(one: dict, other: dict) -> list[str]:
    """Sentences for cases whose outputs differ though the inputs agree, and for cases that one side lacks."""
    told = [f"{case}: only one side has it" for case in sorted(one.keys() ^ other.keys())]
    for case in sorted(one.keys() & other.keys()):
        a, b = one[case], other[case]
        if a["inputs"] == b["inputs"] and a["outputs"] != b["outputs"]:
            told.append(f"{case}: {a['outputs']} and {b['outputs']}")
    return told


def build(name: str, folder: Path) -> Path:
    """Builds the twin into a folder, with tools from an environment of their own. RuntimeError with the compiler's words."""
    (core, kernels), python = BUILDS[name], build_python()
    environment = {**os.environ, "PYTHON": str(python), "TWIN_BUILD": str(folder / "build"), "TWIN_DESTINATION": str(folder)}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    done = subprocess.run(
        [str(ROOT / "tools/ascend/build_twin.sh"), f"-DTWIN_OPTIMISE={core}", f"-DTWIN_KERNEL_OPTIMISE={kernels}"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    made = list(folder.glob("_twin*.so"))
    if done.returncode or len(made) != 1:
        raise RuntimeError(f"the twin cannot be built at {name}:\n{(done.stdout + done.stderr)[-3000:]}")
    return made[0]


def hashes_of(module: Path) -> dict[str, dict[str, str]]:
    """The entries as another build of the twin gives them, in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--module", str(module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def compare_builds() -> tuple[dict, list[str]]:
    """The installed twin's entries, and what differs at other levels and in other builds."""
    mine = hashes()
    told = [f"level {level}: {one}" for level in levels() for one in differences(mine, hashes(level))]
    for name in BUILDS:
        with tempfile.TemporaryDirectory(prefix="twin_build_") as folder:
            told += [f"built at {name}: {one}" for one in differences(mine, hashes_of(build(name, Path(folder))))]
    return mine, told


def _load(module: Path) -> None:
    spec = importlib.util.spec_from_file_location("deepinfer_ascend._twin", module)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["deepinfer_ascend._twin"] = loaded
    spec.loader.exec_module(loaded)
    sys.modules["deepinfer_ascend"]._twin = loaded


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=LEVELS)
    parser.add_argument("--module", type=Path)
    parser.add_argument("--builds", action="store_true")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(arguments)
    if options.module:
        _load(options.module)
    if not options.builds:
        print(json.dumps(hashes(options.level), indent=1))
        return 0
    mine, told = compare_builds()
    if options.report:
        store(options.report, COMMAND, {"levels": levels(), "builds": list(BUILDS), "differences": told, "kernels": mine})
    where = f"{', '.join(levels())} and built at {', '.join(BUILDS)}"
    print("\n".join(told) or f"{len(mine)} cases of {len(ops())} ops: the same bits at {where}")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
