"""Lowers recorded launches to Ascend 950 HIVM IR with the vendor's compiler front half, without an NPU or CANN.

Run in the lowering environment of `ascend_venvs.py`: `python lower_kernels.py [SOC] [problem ...] [field=value ...]`.
Prints one JSON object a line. Three steps: Triton IR (triton-ascend), linalg (triton-adapter-opt), HIVM IR with buffers
allocated and synchronised (bishengir-compile-a5). The last tool then fails, since its back half is part of CANN; what
counts is that the optimised HIVM module was written and nothing else went wrong. A tile that does not fit a buffer
fails with `overflow`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "hal", "backends/triton")]

import ascendnpuir  # noqa: E402
import torch  # noqa: E402
from deepinfer_triton.launch import Launch  # noqa: E402
from deepinfer_triton.targets import ASCEND950  # noqa: E402
from triton._C.libtriton import ir  # noqa: E402
from triton.backends.ascend import compiler as ascend  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import ASTSource  # noqa: E402
from triton_problems import launches, problems  # noqa: E402

SOCS = ("Ascend950PR_9599", "Ascend950PR_9589")
BACK_HALF_MISSING = ("Failed to run BiShengIR pipeline", "hivmc")
"""What the compiler says for the part that only CANN has."""

_ADAPTER = Path(ascend.__file__).parent / "triton-adapter-opt"
_COMPILER = Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile-a5"
_POINTER = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_950 = "compile-on-910-95=True"
_TO_LINALG = (
    f"--discrete-mask-access-conversion={_950} force-simt-template=False",
    "--triton-to-annotation",
    f"--triton-to-unstructure={_950} force-simt-template=False",
    "--triton-to-hivm",
    "--triton-to-hfusion",
    "--triton-to-llvm",
    "--bubble-up-operation",
    "--triton-to-linalg=global-kernel=false named-ops=True enable-nd2nz-on-vector=False "
    f"enable-select-analysis=True {_950}",
)


TIME_LIMIT_S = 60
"""Processor seconds of one tool; a kernel that the compiler cannot lower in this time counts as not lowered."""


class LoweringFailed(Exception):
    """A step of the lowering failed; the message is the tool's own."""


def source(made: Launch) -> ASTSource:
    """The launch as triton-ascend's compiler input."""
    signature, constants = {}, dict(made.constants)
    for name, value in zip(made.kernel.arg_names, made.args, strict=False):
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTER[value.dtype]
        elif value is None:
            constants[name] = None
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return ASTSource(made.kernel, signature, constants)


def triton_ir(made: Launch) -> str:
    """Triton IR of the launch. LoweringFailed with the compiler's message."""
    options = ascend.NPUOptions(num_warps=1, compile_on_910_95=True)
    backend = ascend.AscendBackend(GPUTarget("npu", SOCS[0], 0))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation()
    try:
        module = source(made).make_ir(options, implementation, backend.get_module_map(), context)
        return str(ascend.make_ttir(module, {}, options))
    except Exception as error:  # noqa: BLE001  (whatever the compiler raises is the result)
        raise LoweringFailed(f"Triton IR: {_first_line(str(error))}") from error


def linalg_ir(ttir: Path, out: Path) -> None:
    """Triton IR file to linalg file. LoweringFailed with the adapter's message."""
    done = _run("linalg", [str(_ADAPTER), str(ttir), *_TO_LINALG, "-o", str(out)])
    if done.returncode or not out.exists():
        raise LoweringFailed(f"linalg: {_first_line(done.stderr)}")


def hivm_ir(linalg: Path, soc: str, folder: Path) -> str:
    """The optimised HIVM module for a SoC. LoweringFailed names an overflow or whatever else went wrong."""
    command = [
        str(_COMPILER), str(linalg), f"--target={soc}", "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true", f"--save-temps={folder}", "-o", str(folder / "kernel"),
    ]  # fmt: skip
    done = _run("HIVM", command)
    said = done.stdout + done.stderr
    errors = [
        line for line in said.splitlines()
        if ("error:" in line or "overflow" in line) and not any(known in line for known in BACK_HALF_MISSING)
    ]  # fmt: skip
    module = folder / "module.hivm.opt.mlir"
    if errors or not module.exists():
        told = "\n".join(errors) or said
        raise LoweringFailed(f"HIVM: {_first_line(told)}")
    return module.read_text()


def _run(step: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (TIME_LIMIT_S, TIME_LIMIT_S))

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise LoweringFailed(f"{step}: not done after {TIME_LIMIT_S} s of processor time")
    return done


def _first_line(text: str) -> str:
    """The line that tells most: the first with `error` or `overflow`, without paths."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    told = next((line for line in lines if "overflow" in line), None) or next(
        (line for line in lines if "error" in line), lines[-1]
    )
    return re.sub(r"\S*/(?=[\w.-]+)", "", told)[:300]


def describe(hivm: str) -> dict[str, Any]:
    """What the HIVM module holds: vector functions, tile products on the cube, flags and barriers."""

    def count(pattern: str) -> int:
        return len(re.findall(pattern, hivm))

    return {
        "bytes": len(hivm),
        "vector_functions": count(r"func\.func \S*_vf_\d+"),
        "cube_products": count(r"call @mma_tile\w*"),
        "flags": count(r"hivm\.hir\.(?:set_flag|sync_block_set)"),
        "barriers": count(r"hivm\.hir\.pipe_barrier"),
    }


def lower(made: Launch, soc: str, product: bool) -> dict[str, Any]:
    """One report row; `objections` is empty when the kernel was lowered."""
    start = time.perf_counter()
    row = {"kernel": made.name, "soc": soc, "constants": dict(made.constants)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ttir, linalg = folder / "kernel.ttir", folder / "kernel.linalg.mlir"
        try:
            ttir.write_text(triton_ir(made))
            linalg_ir(ttir, linalg)
            row |= describe(hivm_ir(linalg, soc, folder))
            row["objections"] = (
                ["the matrix product is not on the cube"] if product and not row["cube_products"] else []
            )
        except LoweringFailed as failed:
            row["objections"] = [str(failed)]
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def main(arguments: list[str]) -> None:
    socs = [argument for argument in arguments if argument in SOCS] or list(SOCS)
    changes = {name: int(value) for name, value in (one.split("=") for one in arguments if "=" in one)}
    names = [argument for argument in arguments if argument not in SOCS and "=" not in argument]
    target, seen = dataclasses.replace(ASCEND950, **changes), set()
    for problem in problems():
        if names and problem.name not in names:
            continue
        for made in launches(problem, target):
            key = (made.name, str(made.constants), tuple(type(value).__name__ for value in made.args))
            if key not in seen:
                seen.add(key)
                for soc in socs:
                    row = {"problem": problem.name, "product": problem.product, **lower(made, soc, problem.product)}
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
