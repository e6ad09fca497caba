"""Asks a chip what the twin assumes: one call for each instruction, compared byte by byte with what the twin gave.

    run_probes.py expect FILE.npz                        inputs, and the twin's results
    run_probes.py builds                                 what `build_npu.sh --probes` is to compile: library, source, options
    run_probes.py compare FILE.npz --device npu:0 --libraries build/npu/probes [--report FILE.json] [--only NAME]
    run_probes.py compare FILE.npz --device twin         the same comparison without an NPU

Probes run in a process of their own, which is started again after one that fails or hangs: a failed kernel leaves the
context of its process unusable. Exit 0: all agree; 1: some do not, or failed; 2: nothing ran.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools/ascend", "hal", "backends/ascend")]

import numpy as np  # noqa: E402
import probe_cases  # noqa: E402
import torch  # noqa: E402
from deepinfer_ascend import error_codes, npu_runtime, twin  # noqa: E402
from deepinfer_hal.c_abi import CLibrary, pack_tensor  # noqa: E402
from probe_kernels import TYPES, Probe  # noqa: E402

START_SECONDS, PATIENCE_SECONDS = 300.0, 60.0
"""Until a process is ready, which imports torch and its binding; until a probe has answered."""

AGREES = ("equal", "within", "told")
KEPT = ("name", "kernel", "out", "integers", "reals", "view", "units", "defines")


# ---------------------------------------------------------------------------------------- what the twin says


def expect() -> tuple[list[Probe], list[np.ndarray], list[list[str]]]:
    """Every probe, the bytes that the twin gives for it, and the instructions that it ran."""
    module, probes = twin.module(), probe_cases.probes()
    results, instructions = [], []
    for probe in probes:
        kinds = "t" * len(probe.tensors) + "i" * len(probe.integers) + "d" * len(probe.reals)
        call = module.bind(probe.kernel, kinds, [f"a{i}" for i in range(len(kinds))])
        tensors, stream = [_as_given(probe, image) for image in probe.tensors], module.Stream(trace=True)
        call(*tensors, *probe.integers, *probe.reals, stream=stream)
        trace = twin.take_trace(stream)
        results.append(tensors[probe.out].view(torch.uint8).numpy())
        instructions.append(sorted({trace.ops[op] for op in set(trace.rows["op"].tolist())} - {"Wait", "Arrive", "Await"}))
    return probes, results, instructions


def _as_given(probe: Probe, image: np.ndarray, device: str = "cpu") -> torch.Tensor:
    """An image as the kernel takes it: bytes, or 32-bit integers."""
    whole = torch.from_numpy(image.copy()).to(device)
    return whole.view(torch.int32) if probe.kernel in ("probe_sync", "probe_scalar") else whole


def write(path: Path, made: tuple[list[Probe], list[np.ndarray], list[list[str]]]) -> None:
    """One archive with inputs, results and what the calls are."""
    arrays: dict[str, np.ndarray] = {}
    described = []
    for number, (probe, result, ran) in enumerate(zip(*made, strict=True)):
        described.append({**{key: getattr(probe, key) for key in KEPT}, "tensors": len(probe.tensors), "instructions": ran})
        arrays[f"{number}.expected"] = result
        arrays.update({f"{number}.{i}": image for i, image in enumerate(probe.tensors)})
    arrays["probes"] = np.frombuffer(json.dumps(described).encode(), np.uint8)
    np.savez_compressed(path, **arrays)


def read(path: Path) -> dict[str, tuple[Probe, np.ndarray, list[str]]]:
    """name -> the probe, what is expected of it, and its instructions."""
    archive, found = np.load(path), {}
    for number, one in enumerate(json.loads(archive["probes"].tobytes())):
        tensors, ran = tuple(archive[f"{number}.{i}"] for i in range(one.pop("tensors"))), one.pop("instructions")
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
        found[one["name"]] = (Probe(tensors=tensors, **given), archive[f"{number}.expected"], ran)
    return found


def builds() -> Iterator[str]:
    """A line for each device library: its name, its source and the options that narrow it, separated by tabs."""
    seen = {}
    for probe in probe_cases.probes():
        seen.setdefault(probe.library, (probe.kernel, probe.defines))
    for library, (kernel, defines) in seen.items():
        yield "\t".join([library, f"kernels_ascendc/twin/probes/{kernel}.asc", *(f"-D{define}" for define in defines)])


# ---------------------------------------------------------------------------------------- comparing


def judge(probe: Probe, expected: np.ndarray, got: np.ndarray) -> dict[str, Any]:
    """Verdict: equal, within the units that a page allows, told (nothing settles it), or differs, with the first place."""
    if np.array_equal(expected, got):
        return {"verdict": "equal"}
    kind = TYPES[probe.view][1]
    a, b = expected.view(kind), got.view(kind)
    apart = units_apart(a, b)
    where = np.flatnonzero(apart)
    if not where.size:
        return {"verdict": "equal"}  # NaNs of different bits
    worst, first = int(apart.max()), int(where[0])
    told = {
        "units": worst, "different": int(where.size), "of": int(a.size), "first": first, "expected": str(a[first]),
        "got": str(b[first]),
    }  # fmt: skip
    if np.array_equal(got, probe.tensors[probe.out]):
        return {"verdict": "differs", **told, "untouched": True}
    verdict = "told" if probe.units is None else "within" if worst <= probe.units else "differs"
    return {"verdict": verdict, **told}


def units_apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Representable values between two floats, plain difference of integers; 0 for two NaNs, a billion for one."""
    if a.dtype.kind in "iu":
        return np.abs(a.astype(np.int64) - b.astype(np.int64))
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    half = 1 << (8 * a.dtype.itemsize - 1)
    nan_a, nan_b = np.isnan(a.astype(np.float32)), np.isnan(b.astype(np.float32))

    def line(x: np.ndarray) -> np.ndarray:
        bits = x.view(unsigned).astype(np.int64)
        return np.where(bits >= half, half - bits, bits)

    return np.where(nan_a | nan_b, np.where(nan_a & nan_b, 0, 10**9), np.abs(line(a) - line(b)))


def runner(device: str, libraries: Path | None) -> Callable[[Probe], np.ndarray]:
    """Runs a probe on a device and gives its result's bytes. FileNotFoundError if its library was not built."""
    if device.startswith("npu"):
        index = int(device.partition(":")[2] or 0)
        npu_runtime.open_device(index)
        stream: Any = lambda: npu_runtime.current_stream_pointer(index)  # noqa: E731
    else:
        stream = None
    place = "cpu" if device == "twin" else device
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=place)

    def run(probe: Probe) -> np.ndarray:
        path = Path(twin.module().__file__) if libraries is None else libraries / f"{probe.library}.so"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: it did not compile; see its log in {path.parent}")
        library = CLibrary(path, stream=stream, workspace=(workspace.data_ptr(), workspace.numel()))
        tensors = [_as_given(probe, image, place) for image in probe.tensors]
        library.function(probe.kernel)([pack_tensor(tensor) for tensor in tensors], probe.integers, probe.reals)
        if device.startswith("npu"):
            npu_runtime.synchronize(int(device.partition(":")[2] or 0))
        return tensors[probe.out].view(torch.uint8).cpu().numpy()

    return run


def child(path: Path, device: str, libraries: Path | None) -> int:
    """Runs the probes named on standard input, a line of JSON each; ends after one that failed on the device."""
    known, run = read(path), runner(device, libraries)
    print(json.dumps("ready"), flush=True)
    for name in sys.stdin.read().split():
        probe, expected, _ = known[name]
        try:
            found = judge(probe, expected, run(probe))
        except FileNotFoundError as error:
            found = {"verdict": "not built", "message": str(error)}
        except Exception as error:  # whatever the runtime says is the answer
            print(json.dumps({"verdict": "failed", "message": f"{type(error).__name__}: {error}"}), flush=True)
            return 1
        print(json.dumps(found), flush=True)
    return 0


def compare(path: Path, device: str, libraries: Path | None, names: list[str]) -> list[dict[str, Any]]:
    """One result for each name, in order, with the instructions that it asks about."""
    known, results = read(path), []
    while len(results) < len(names):
        results += _session(path, device, libraries, names[len(results) :])
    return [{"name": name, "instructions": known[name][2], **result} for name, result in zip(names, results, strict=True)]


def _session(path: Path, device: str, libraries: Path | None, names: list[str]) -> list[dict[str, Any]]:
    """What one process told before it ended; the probe at which it died or hung has a result too."""
    command = [sys.executable, __file__, "child", str(path), "--device", device]
    command += ["--libraries", str(libraries)] if libraries else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    process.stdin.write("\n".join(names))
    process.stdin.close()
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)
    reader.start()
    threading.Thread(target=lambda: [*map(lines.put, process.stdout), lines.put(None)], daemon=True).start()
    told: list[dict[str, Any]] = []
    patience = START_SECONDS
    while len(told) < len(names):
        try:
            line = lines.get(timeout=patience)
        except queue.Empty:
            process.kill()
            told.append({"verdict": "hung", "message": f"no answer within {patience:g} s"})
            break
        if line is None:
            break
        answer, patience = json.loads(line), PATIENCE_SECONDS
        if answer == "ready":
            continue
        told.append(answer)
        if answer["verdict"] == "failed":
            break
    code = process.wait()
    reader.join(timeout=5)
    if not told or (len(told) < len(names) and told[-1]["verdict"] not in ("failed", "hung")):
        said = [line for line in "".join(errors).splitlines() if line.strip()] or ["nothing"]
        told.append({"verdict": "crashed", "message": f"the process ended with {code}; it said: {said[-1]}"})
    return told


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("expect", "builds", "compare", "child"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--device", default="twin")
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--only", action="append", help="probes whose name begins so; may be repeated")
    options = parser.parse_args(arguments)
    if options.what == "builds":
        print("\n".join(builds()))
        return 0
    if options.file is None:
        parser.error(f"{options.what} needs a file")
    if twin.module() is None and (options.what == "expect" or options.libraries is None):
        print(twin.unavailable_reason(), file=sys.stderr)
        return 2
    if options.what == "expect":
        made = expect()
        write(options.file, made)
        print(f"{len(made[0])} probes of {len({i for ran in made[2] for i in ran})} instructions -> {options.file}")
        return 0
    if not options.file.is_file():
        print(f"{options.file} is absent; `run_probes.py expect FILE` (step `twin` of bringup.sh) writes it", file=sys.stderr)
        return 2
    if options.what == "child":
        return child(options.file, options.device, options.libraries)
    return _report(options)


def _report(options: argparse.Namespace) -> int:
    names = [n for n in read(options.file) if not options.only or n.startswith(tuple(options.only))]
    results = compare(options.file, options.device, options.libraries, names)
    counts: dict[str, int] = {}
    for result in results:
        counts[result["verdict"]] = counts.get(result["verdict"], 0) + 1
        if result["verdict"] != "equal":
            print(f"{result['verdict']:9} {result['name']}: {_words(result)}")
    print(f"{options.device}: {len(results)} probes, " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if options.report:
        document = {"device": options.device, "counts": counts, "results": results}
        options.report.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not results:
        return 2
    return 0 if all(result["verdict"] in AGREES for result in results) else 1


def _words(result: dict[str, Any]) -> str:
    if "message" in result:
        meant = "; ".join(meaning.says for meaning in error_codes.explain(result["message"]))
        return result["message"] + (f" ({meant})" if meant else "")
    if result.get("untouched"):
        return "the result is as it was before the call: the kernel ran nowhere, or was built for another architecture"
    return (
        f"{result['different']} of {result['of']} values, at most {result['units']} units; the first at {result['first']}: "
        f"expected {result['expected']}, got {result['got']}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
