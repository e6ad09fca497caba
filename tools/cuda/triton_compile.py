"""Compiles recorded launches for an NVIDIA architecture without a device, and says what came out.

Run inside an environment of `triton_venvs.py`: `python triton_compile.py sm90|sm100|sm103 [name ...]` prints one JSON object
a line.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "hal", "backends/triton")]

import torch  # noqa: E402
import triton  # noqa: E402
from deepinfer_triton.launch import Launch  # noqa: E402
from deepinfer_triton.targets import TARGETS, Target  # noqa: E402
from ptx_check import objections  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton_problems import Problem, launches, problems  # noqa: E402

PRODUCT_CONSTANTS = {"DOT", "WIDE"}
"""What every kernel with a matrix product is told about it; other kernels of the same call have none."""

ARCH = {"sm90": 90, "sm100": 100, "sm103": 103}
_POINTER = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def source(made: Launch) -> ASTSource:
    """The launch as a compiler input, specialised as Triton's own launcher would: ones are constants, 16s divisible."""
    kernel, signature, constants, attributes = made.kernel, {}, dict(made.constants), {}
    fixed = {param.name for param in kernel.params if param.do_not_specialize}
    for index, (name, value) in enumerate(zip(kernel.arg_names, made.args, strict=False)):
        if value is None or (isinstance(value, int) and value == 1 and name not in fixed):
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTER[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and name not in fixed:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    return ASTSource(kernel, signature, constants, attributes)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, spilled bytes a thread, and static shared memory, as cuobjdump reads them from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text))
    return {"registers": int(found["REG"]), "spill_bytes": int(found["STACK"]) + int(found["LOCAL"])}


def assemble(problem: Problem, target: Target, made: Launch) -> dict[str, Any]:
    """One compiled kernel as a report row; `objections` lists what is wrong with it."""
    start = time.perf_counter()
    row = {"problem": problem.name, "kernel": made.name, "target": target.name, "triton": triton.__version__}
    constants = {name: value for name, value in made.constants.items() if name.isupper()}
    product = problem.product and bool(PRODUCT_CONSTANTS & set(constants))
    try:
        compiled = triton.compile(source(made), target=GPUTarget("cuda", ARCH[target.name], 32), options=made.options)
    except Exception as error:  # noqa: BLE001  (whatever the compiler raises is the row's result)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {**row, "constants": constants, "objections": [f"does not compile: {lines[0][:300]}"]}
    ptx = compiled.asm["ptx"]
    used = resources(compiled.asm["cubin"])
    instructions = sorted(set(re.findall(r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*", ptx)))
    return {
        **row, **used, "shared_bytes": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
        "constants": constants, "matrix_instructions": instructions,
        "objections": objections(ptx, target.name, product, problem.quantised_product, used["spill_bytes"]),
        "seconds": round(time.perf_counter() - start, 2),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    overrides = [argument for argument in arguments if "=" in argument]
    names = [argument for argument in arguments[1:] if "=" not in argument]
    changes = {name: int(value) for name, value in (one.split("=") for one in overrides)}
    target = dataclasses.replace(TARGETS[arguments[0]], **changes)
    seen = set()
    for problem in problems():
        if names and problem.name not in names:
            continue
        for made in launches(problem, target):
            key = (problem.op, made.name, str(made.constants), tuple(type(value).__name__ for value in made.args))
            if key not in seen:
                seen.add(key)
                print(json.dumps(assemble(problem, target, made)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
