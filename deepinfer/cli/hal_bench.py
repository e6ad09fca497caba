"""`deepinfer hal bench`: every op at a model's real shapes, its speed beside the roofline measured in the same run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.cli.options import human_size
from deepinfer.cli.terminal import note

_USAGE, _INTERRUPTED = 2, 130


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


def _size(help: str, *names: str) -> Any:
    return typer.Option(*names, parser=human_size, metavar="N", help=help)


def hal_bench(
    backend: Annotated[str, _option("A backend's name, with an index as in cpu:0.")],
    op: Annotated[list[str] | None, _option("Only this op; may be repeated.")] = None,
    shapes: Annotated[str, _option("v41 or nano: the model whose shapes are measured.")] = "v41",
    rows: Annotated[list[int] | None, _option("Only steps of so many token rows; may be repeated.")] = None,
    experts: Annotated[int, _option("Experts of one rank.", min=1)] = 8,
    repeats: Annotated[int, _option("Samples of a row; the median is printed.", min=1)] = 9,
    row_seconds: Annotated[float, _option("Time that a row may take; a row that needs more is listed as not run.")] = 60.0,
    memory: Annotated[int, _size("Host memory that a row may take, such as 8G; 0: half of the machine's.")] = 0,
    cache: Annotated[int, _size("Bytes that the buffers of a row exceed together; 0: the last-level cache.")] = 0,
    jobs: Annotated[int, _option("Processes that draw and check rows; each is timed alone.", "--jobs", "-j", min=1)] = 1,
    seconds: Annotated[float, _option("Rows that have not begun by then are not run; 0: no limit.", min=0)] = 0.0,
    report: Annotated[Path | None, _option("A report of `hal test`: its kernels must be those measured here.")] = None,
    json_file: Annotated[Path | None, _option("Store the whole result as JSON in this file.", "--json")] = None,
) -> int:
    """Time, GB/s, FLOP/s and share of the measured roofline of each op. Exit 0: rows were timed and none failed."""
    from deepinfer_hal.bench import Budget, run_bench
    from deepinfer_hal.bench_jobs import run_bench_jobs
    from deepinfer_hal.conformance.host import describe_subject, describe_suite
    from deepinfer_hal.conformance.report import check_writable, read_report, require_intact
    from deepinfer_hal.registry import open_backend

    from deepinfer.bench.report import make_report, write_report
    from deepinfer.errors import BackendUnavailable, BadCall

    try:
        opened, index = open_backend(backend)
        _check_rows(shapes, op or (), rows or ())
        if json_file is not None:
            check_writable(json_file)
        known = read_report(report) if report is not None else None
        if known is not None:
            require_intact(known, "compare kernels with")
        budget = Budget(repeats, row_seconds, memory, cache)
        print(_HEAD, flush=True)
        ends = time.time() + seconds if seconds else math.inf
        chosen = dict(shapes=shapes, experts=experts, ops=tuple(op or ()), rows=tuple(rows or ()), budget=budget, ends=ends)
        if jobs > 1:
            result = run_bench_jobs(f"{opened.name}:{index}", jobs, conformance=report, listen=_print_row, **chosen)
        else:
            result = run_bench(opened, index, conformance=known, listen=_print_row, **chosen)
    except (BadCall, BackendUnavailable) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return _USAGE
    if json_file is not None:
        result["suite"], result["subject"] = describe_suite(), describe_subject(opened, index)
        settings = {"backend": backend, "report": None if report is None else report.name}
        write_report(json_file, make_report("hal", settings, result))
        note(f"wrote {json_file}")
    return _conclude(result)


def _check_rows(shapes: str, ops: Collection[str], rows: Collection[int]) -> None:
    """BadCall for an unknown name, or for token rows of which these ops have no step."""
    from deepinfer_hal.bench import check_names
    from deepinfer_hal.bench_shapes import MODELS, bench_cases

    from deepinfer.errors import BadCall

    check_names(shapes, ops)
    sizes = {case.rows for case in bench_cases(MODELS[shapes], 1, ops=tuple(ops))}
    if sizes and (unknown := sorted(set(rows) - sizes)):
        raise BadCall(f"no step has {unknown[0]} token rows: --rows must be among {', '.join(map(str, sorted(sizes)))}")


_HEAD = f"{'op':42} {'rows':>5} {'median':>10} {'min':>10} {'max':>10} {'GB/s':>8} {'GFLOP/s':>9} {'share':>7}  kernel"


def _print_row(row: Any) -> None:
    name = row.op + (f" [{row.use}]" if row.use else "")
    if row.verdict != "pass":
        print(f"{name:42} {row.rows:5} {row.verdict}: {row.reason}", flush=True)
        return
    times = " ".join(f"{_time(row.seconds[key]):>10}" for key in ("median", "min", "max"))
    speeds = f"{row.bytes_per_second / 1e9:8.2f} {row.flops_per_second / 1e9:9.2f}"
    print(f"{name:42} {row.rows:5} {times} {speeds} {row.share:6.1%}  {row.symbol}", flush=True)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _conclude(result: dict[str, Any]) -> int:
    verdicts = [row["verdict"] for row in result["rows"]]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts)) or "no rows"
    ceilings = result["ceilings"]
    products = ", ".join(f"{value / 1e9:.0f} GFLOP/s {name}" for name, value in ceilings["gemm_flops"].items())
    print(f"ceilings: {ceilings['bandwidth'] / 1e9:.1f} GB/s by a copy of {ceilings['copy_bytes'] >> 20} MiB; {products}")
    before, after = result["load_average"]
    print(f"load average of the host {before:.1f} before, {after:.1f} after; what else runs slows medians more than minima")
    print(f"{result['device']}, shapes of {result['shapes']['name']}, {result['threads']} threads: {counts}")
    if result.get("interrupted"):
        return _INTERRUPTED
    return 1 if "fail" in verdicts else 0 if "pass" in verdicts else _USAGE
