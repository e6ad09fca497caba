"""compute-sanitizer over one small case of every kernel: memcheck and racecheck.

    python tools/cuda/sanitize.py --json reports/h200/sanitize.json

Starting the tool takes far longer than a case, so a process runs several kernels; if anything at all is wrong in it, each of
them runs again in a process of its own. A clean answer counts only where the kernel ran under the tool, and where the tool
found the two errors that sanitize_control.cu plants. Exit status 0: all clean; 1: something was found or did not run; 2: the
tool is not usable.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = [str(ROOT), *(str(ROOT / part) for part in ("hal", "backends/cpu", "backends/cuda", "backends/triton"))]
sys.path[:0] = TREE

TOOLS = ("memcheck", "racecheck")
FOUND = 86
"""Exit status that the tool is asked for when it found something."""

MOST_BYTES = 256 << 10
"""A case is the largest of an op that moves no more than this, since the tool slows memory accesses a hundredfold."""

FURTHER = {
    "grouped_gemm": [  # rows an expert decide the form, as do granules of 64 features a block where rows are few
        "grouped_gemm(M=280,E=4,K=256,N=128,x=u8,w=fp4_row32,out=bf16)",
        "grouped_gemm(M=440,E=4,K=128,N=128,x=u8,w=fp4_row32,out=bf16)",
        "grouped_gemm(M=600,E=4,K=128,N=64,x=u8,w=fp4_row32,out=bf16)",
        "grouped_gemm(M=300,E=48,K=128,N=768,x=u8,w=fp4_row32,out=bf16)",
    ],
    "grouped_linear": ["grouped_linear(T=200,G=8,K=512,N=128,x=u8,w=fp8_block32,out=bf16)"],  # two slices, two passes
    "linear": [
        "linear(T=64,K=512,N=128,x=u8,w=fp8_block32,out=bf16)",  # two slices, whose blocks are a cluster
        "linear(T=20,K=512,N=128,x=u8,w=fp8_block32,out=bf16)",
        "linear(T=9,K=512,N=128,x=u8,w=fp8_block32,out=bf16)",
        "linear(T=64,K=768,N=5152,x=u8,w=fp8_block32,out=bf16)",  # three slices, which meet in the workspace
        "linear(T=64,K=768,N=5120,x=u8,w=fp8_block32,out=bf16)",  # three slices, of which two are a cluster
        "linear(T=9,K=768,N=5120,x=u8,w=fp8_block32,out=f32)",
        "linear(T=100,K=256,N=288,x=u8,w=fp8_block32,out=bf16)",  # more than 64 rows: one slice, and the same three ways
        "linear(T=100,K=512,N=128,x=u8,w=fp8_block32,out=bf16)",
        "linear(T=100,K=768,N=5152,x=u8,w=fp8_block32,out=bf16)",
        "linear(T=100,K=1536,N=5120,x=u8,w=fp8_block32,out=bf16)",  # sums come where rows were expanded, here and below
        "linear(T=100,K=3072,N=128,x=u8,w=fp8_block32,out=f32)",
        "linear(T=150,K=512,N=128,x=u8,w=fp8_block32,out=f32)",  # more than 128 rows: two slices, five, and the same threes
        "linear(T=150,K=1280,N=128,x=u8,w=fp8_block32,out=f32)",
        "linear(T=150,K=768,N=5120,x=u8,w=fp8_block32,out=bf16)",
        "linear(T=150,K=768,N=5152,x=u8,w=fp8_block32,out=bf16)",
        "linear(T=200,K=1280,N=128,x=u8,w=fp8_block32,out=f32)",
        "linear(T=200,K=768,N=5120,x=u8,w=fp8_block32,out=bf16)",
        "linear(T=150,K=4096,N=128,x=u8,w=fp8_block32,out=f32)",  # so many steps that their stages are used again
        "linear(T=200,K=4096,N=128,x=u8,w=fp8_block32,out=f32)",
        "linear(T=2360,K=512,N=7936,x=u8,w=fp8_block32,out=bf16)",  # parts, of which the next is expanded meanwhile
        "linear(T=33,K=256,N=288,x=u8,w=fp8_block32,out=f32)",  # one slice
        "linear(T=20,K=256,N=288,x=u8,w=fp8_block32,out=f32)",
        "linear(T=20,K=1024,N=40,x=bf16,w=bf16,out=f32)",  # eight slices of few columns
        "linear(T=90,K=512,N=160,x=bf16,w=bf16,out=f32)",
        "linear(T=90,K=96,N=70,x=bf16,w=bf16,out=f32)",  # a tile of 96 rows, fewer of which are copied
    ],
    "sparse_attention": [  # more rows than multiprocessors, so that a block alone attends to a row, some to a second one
        "sparse_attention(requests=0+140,3+5,heads=4,D=512,k=8,block_rows=64,dtype=bf16,window=fp8_32,compressed=fp4_16,storage=ring)",
        # so many rows that what they read is expanded first
        "sparse_attention(requests=0+520,heads=4,D=512,k=8,block_rows=64,dtype=bf16,window=fp8_32,compressed=fp4_16,storage=flat)",
        # rows of BF16: whole ones, and then some that blocks divide
        "sparse_attention(requests=0+140,3+5,heads=4,D=512,k=8,block_rows=64,dtype=bf16,window=bf16,compressed=bf16,storage=flat)",
    ],
    "residual_site": [  # more rows than blocks at once: tiles by the copy engine, a thread a row's Sinkhorn
        "residual_site(T=400,m=4,H=5120,dtype=bf16,codes=True)",  # more tiles a block than stages
        "residual_site(T=1100,m=4,H=256,dtype=bf16,codes=False,first=True)",
    ],
    "hyper_connection_pre": ["hyper_connection_pre(T=1100,m=4,H=256,dtype=bf16)"],
    "mask_logits": ["mask_logits(S=33,V=8200,L=300,mode=all)"],  # rows enough to go by fours, after penalties and biases
    "permute": ["permute(T=450,K=64,E=8,k=6,x=u8)"],  # more pairs than a block looks at
    "score_index": [  # so many columns that rows whose candidates are all that they see are scored apart
        "score_index(requests=0+260,heads=4,d=128,q=mxfp4_32,format=mxfp4_32,block_rows=64,dtype=bf16,ratio=1,candidates=2048)",
    ],
    "select_topk": ["select_topk(rows=300,columns=1000,k=64)"],  # short rows, more of them than large blocks run at once
    "draft_attention": [  # more rows than pairs of multiprocessors
        "draft_attention(anchors=3,127,300,128,200,7,140,0,64,90,135,20,11,250,block=5,heads=4,D=512,dtype=bf16,format=fp8_32,storage=ring)",
    ],
}
"""op -> cases beside that one: a kernel that takes another way for other sizes is to be seen on each of its ways."""

CONTROLS = {"memcheck": 0, "racecheck": 1}
"""Tool -> which planted error of sanitize_control.cu it must find."""

RAN = "the kernel ran"


@dataclass
class Answer:
    """What one tool said of one kernel. verdict: clean | found | timeout | did-not-run. together, seconds: kernels of the
    process that it ran in, and of that process."""

    symbol: str
    op: str
    case: str
    tool: str
    verdict: str = "did-not-run"
    errors: int = 0
    seconds: float = 0.0
    together: int = 1
    first: str = ""


def main() -> int:
    args = _arguments()
    if args.run:
        return _run(args.backend, json.loads(args.run))
    if args.control is not None:
        return _run_control(args.control)
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("error: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    started = time.monotonic()
    ends = started + args.total
    with tempfile.TemporaryDirectory() as folder:
        library = _build_control(Path(folder))
        controls = [Answer(f"planted {name}", "control", library, name) for name in TOOLS]
        kernels = [Answer(*one, name) for name in TOOLS for one in _chosen(args.backend, args.op)]
        chunks = [chunk for name in TOOLS for chunk in _chunks([one for one in kernels if one.tool == name], args.together)]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            asked = [[one] for one in controls] + chunks
            list(pool.map(lambda one: _ask(tool, args.backend, one, args.seconds, ends), asked))
            again = [one for chunk in chunks if len(chunk) > 1 for one in chunk if one.verdict != "clean"]
            list(pool.map(lambda one: _ask(tool, args.backend, [one], args.seconds, ends), again))
    for answer in kernels:
        if answer.verdict != "clean":
            print(f"{answer.verdict:12} {answer.tool:10} {answer.symbol}  {answer.first}", flush=True)
    work = controls + kernels
    return _report(work, args, tool, time.monotonic() - started)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="cuda:0")
    parser.add_argument("--op", action="append", help="only this op; may be repeated")
    parser.add_argument("--json", type=Path, help="store the answers here")
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of one process")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds for all; what is left then did not run")
    parser.add_argument("--together", type=int, default=8, help="kernels of one process")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # the child: [[symbol, case], ...]
    parser.add_argument("--control", help=argparse.SUPPRESS)  # the child: LIBRARY:WHICH
    return parser.parse_args()


def _chosen(spec: str, ops: list[str] | None) -> list[tuple[str, str, str]]:
    """(symbol, op, case id) of every kernel that the backend offers itself: a small case, and FURTHER ones that it serves."""
    from deepinfer_hal.conformance.cases import parse_case
    from deepinfer_hal.registry import open_backend

    backend, index = open_backend(spec)
    kernels = [kernel for kernel in backend.kernels(index) if not ops or kernel.op in ops]
    chosen = [(kernel.symbol, kernel.op, _small_case(backend, index, kernel)) for kernel in kernels]
    for kernel in kernels:
        served = [case for case in FURTHER.get(kernel.op, []) if _served_bytes(backend, index, kernel, parse_case(case))]
        chosen += [(kernel.symbol, kernel.op, case) for case in served]
    return chosen


def _small_case(backend, index, kernel) -> str:
    """The largest of the card's cases that moves MOST_BYTES at most, else the smallest that the kernel serves; a kernel for a
    model's own sizes has one of those. Empty if it serves none."""
    from deepinfer_hal.bench_shapes import V41, bench_cases
    from deepinfer_hal.card import get_card
    from deepinfer_hal.conformance.cases import op_cases

    card = get_card(kernel.op)
    for cases in (op_cases(card), op_cases(card, "full"), (one.case for one in bench_cases(V41, 2, (1,), (kernel.op,)))):
        sizes = {case.id: size for case in cases if (size := _served_bytes(backend, index, kernel, case))}
        small = {id: size for id, size in sizes.items() if size <= MOST_BYTES}
        if sizes:
            return max(small, key=small.get) if small else min(sizes, key=sizes.get)
    return ""


def _served_bytes(backend, index, kernel, case) -> int:
    """Bytes that a case moves; 0 if it has no rows or the kernel does not serve it."""
    from deepinfer_hal.card import get_card
    from deepinfer_hal.conformance.problem import Problem, Subject
    from deepinfer_hal.kernel import Yes

    problem = Problem(Subject(get_card(kernel.op), kernel, backend, index), case)
    served = not problem.empty and isinstance(kernel.supports(problem.spec), Yes)
    return int(problem.card.cost(problem.pristine).bytes) if served else 0


def _chunks(answers: list[Answer], most: int) -> list[list[Answer]]:
    return [answers[start : start + most] for start in range(0, len(answers), most)]


def _ask(tool: str, spec: str, answers: list[Answer], seconds: float, ends: float) -> None:
    """Runs the tool over one child, which runs the answers' kernels one after the other, and fills the answers in."""
    seconds, answers = min(seconds, ends - time.monotonic()), [answer for answer in answers if answer.case]
    if not answers or seconds <= 0:
        return
    first = answers[0]
    if first.op == "control":
        child = ["--control", f"{first.case}:{CONTROLS[first.tool]}"]
    else:
        child = ["--backend", spec, "--run", json.dumps([(answer.symbol, answer.case) for answer in answers])]
    command = [tool, "--tool", first.tool, "--error-exitcode", str(FOUND), sys.executable, __file__, *child]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(TREE)}
    started = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
        text, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        text, status = "", None
    for answer in answers:
        answer.seconds, answer.together = round(time.monotonic() - started, 1), len(answers)
        _read(answer, text, status)


def _read(answer: Answer, text: str, status: int | None) -> None:
    """The verdict on one kernel from what the tool said of its process, and the process's exit status (None: no time)."""
    answer.first, answer.errors = "", 0
    if status is None:
        answer.verdict = "timeout"
        return
    told = [line.lstrip("= ") for line in text.splitlines() if line.startswith("=========")]
    counts = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    answer.errors = int(counts[1]) if counts else 0
    named = [line for line in told if re.search(r"Invalid|hazard|error|Error|Race", line) and "SUMMARY" not in line]
    if answer.errors or status == FOUND:
        answer.verdict, answer.first = "found", (named or ["the tool says so by its exit status"])[0][:300]
    elif status == 0 and counts and f"{RAN}: {answer.symbol}\n" in text:
        answer.verdict = "clean"
    else:
        answer.verdict = "did-not-run"
        answer.first = " ".join(text.split()[-40:])[:300]


def _report(work: list[Answer], args: argparse.Namespace, tool: str, seconds: float) -> int:
    controls = [answer for answer in work if answer.op == "control"]
    kernels = [answer for answer in work if answer.op != "control"]
    usable = all(answer.verdict == "found" for answer in controls)
    clean = usable and bool(kernels) and all(answer.verdict == "clean" for answer in kernels)
    for answer in controls:
        answer.case = "sanitize_control.cu"
        print(f"control {answer.tool}: {answer.verdict} ({answer.seconds:.0f} s) {answer.first}")
    verdicts = [answer.verdict for answer in kernels]
    counts = {word: verdicts.count(word) for word in dict.fromkeys(verdicts)}
    print(f"{len({a.symbol for a in kernels})} kernels: {counts} in {seconds:.0f} s")
    if args.json is not None:
        version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
        document = {
            "tool": next((line.strip() for line in version if "ersion" in line), ""), "counts": counts, "controls_found": usable,
            "clean": clean, "seconds": round(seconds, 1), **_facts(args.backend), "answers": [asdict(answer) for answer in work],
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0 if clean else 1 if usable else 2


def _facts(spec: str) -> dict[str, object]:
    from deepinfer_hal.conformance.host import describe_host, describe_subject, describe_suite
    from deepinfer_hal.registry import open_backend

    return {"host": describe_host(), "suite": describe_suite(), "subject": describe_subject(*open_backend(spec))}


# ---------------------------------------------------------------------------------------------------- children


def _run(spec: str, wanted: list[tuple[str, str]]) -> int:
    """Runs each kernel twice on its case, in guarded memory, and waits."""
    from deepinfer_hal.card import get_card
    from deepinfer_hal.conformance.cases import parse_case
    from deepinfer_hal.conformance.problem import Problem, Subject
    from deepinfer_hal.registry import open_backend

    backend, index = open_backend(spec)
    kernels = {kernel.symbol: kernel for kernel in backend.kernels(index)}
    for symbol, case in wanted:
        kernel = kernels[symbol]
        problem = Problem(Subject(get_card(kernel.op), kernel, backend, index), parse_case(case))
        placed = problem.place()
        for _ in range(2):
            problem.call(placed.args)
        print(f"{RAN}: {symbol}", flush=True)
    return 0


def _build_control(folder: Path) -> str:
    """The library with the planted errors; empty where there is no nvcc, so that the controls fail."""
    nvcc, library = shutil.which("nvcc"), folder / "control.so"
    if nvcc is None:
        return ""
    source = Path(__file__).with_name("sanitize_control.cu")
    command = [nvcc, "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(source)]
    return str(library) if subprocess.run(command, check=False).returncode == 0 else ""


def _run_control(which: str) -> int:
    library, _, number = which.rpartition(":")
    status = ctypes.CDLL(library).planted(int(number))
    print(f"status {status}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
