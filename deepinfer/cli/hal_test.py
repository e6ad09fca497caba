"""`deepinfer hal test` and `deepinfer hal record`: run the conformance suite, and record op calls for it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.cli.options import Json
from deepinfer.cli.terminal import note, print_json

_USAGE, _INTERRUPTED = 2, 130


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


def hal_test(
    backend: Annotated[str, _option("A backend's name, with an index as in cpu:0.")],
    profile: Annotated[str, _option("core or full.")] = "core",
    op: Annotated[list[str] | None, _option("Only this op; may be repeated.")] = None,
    case: Annotated[list[str] | None, _option("Only the case of this id; may be repeated.")] = None,
    report: Annotated[Path | None, _option("Store hal-report.json here.")] = None,
    waivers: Annotated[Path | None, _option("JSON list of known failures: id, reason, expires.")] = None,
    trace: Annotated[list[str] | None, _option("Also run the calls of a file that `hal record` wrote.")] = None,
    reference: Annotated[bool, _option("Test the references on the backend's torch device.", "--reference")] = False,
    seed: Annotated[int, _option("Of the cases' data.")] = 0,
    case_seconds: Annotated[float, _option("Time limit of a case; 0: the profile's.", min=0)] = 0.0,
    jobs: Annotated[int, _option("Worker processes; more than one disturb each other's times.", "--jobs", "-j", min=1)] = 1,
    seconds: Annotated[float, _option("Time of the whole run, then the rest is not run; 0: no limit.", min=0)] = 0.0,
    resume: Annotated[Path | None, _option("Keep what passed in this report of the same sources and device.")] = None,
    verbose: Annotated[bool, _option("Print every case, not only what did not pass.", "--verbose", "-v")] = False,
    as_json: Json = False,
) -> int:
    """Does every kernel do what its card says? Exit 0: something ran and nothing failed; 1: a failure; 2: nothing ran; 130:
    interrupted."""
    from deepinfer_hal.conformance import Plan, run_suite
    from deepinfer_hal.conformance.report import check_writable, make_report, read_report, write_report
    from deepinfer_hal.conformance.verdict import read_waivers

    from deepinfer.errors import BackendUnavailable, BadCall

    plan = Plan(
        spec=backend, profile=profile, ops=tuple(op or ()), cases=tuple(case or ()), reference=reference,
        traces=tuple(trace or ()), seed=seed, case_seconds=case_seconds,
    )  # fmt: skip
    try:
        if report is not None:
            check_writable(report)
        known = read_waivers(waivers) if waivers else []
        earlier = read_report(resume) if resume is not None else None
        run = run_suite(
            plan, waivers=known, listen=_Progress(verbose, quiet=as_json), jobs=jobs, seconds=seconds or float("inf"),
            resume=earlier,
        )  # fmt: skip
    except (BadCall, BackendUnavailable) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return _USAGE
    document = make_report(run) if report is not None or as_json else None
    if report is not None:
        write_report(report, document)
    if as_json:
        print_json(document)
    else:
        _print_summary(run)
    if run.interrupted and report is not None:
        note(f"interrupted; what ran is in {report}, and `--resume {report}` goes on from it")
    return _INTERRUPTED if run.interrupted else run.exit_status()


class _Progress:
    """Prints results as they come: those that did not pass, or all; what no kernel serves is summed up at the end."""

    def __init__(self, verbose: bool, quiet: bool) -> None:
        self.verbose, self.quiet = verbose, quiet

    def __call__(self, result: Any) -> None:
        ordinary = result.verdict in ("pass", "unsupported")
        if not self.quiet and (self.verbose or not ordinary):
            print(result.line(), flush=True)


def _print_summary(run: Any) -> None:
    subject = run.subject
    for result in run.results:
        if result.verdict == "waived":
            print(f"waived      {result.key}  {result.reason}")
    for problem in run.waiver_problems:
        print(f"waivers     {problem}")
    print_unsupported(run.results)
    counts = ", ".join(f"{count} {word}" for word, count in run.counts().items()) or "no cases"
    print(f"{subject['backend']}:{subject['index']} ({subject['device']}): {counts} in {run.seconds:.0f} s")
    verdict = {0: "passed", 1: "FAILED", 2: "nothing was claimed or run, which is no pass"}[run.exit_status()]
    if late := run.counts().get("not-run", 0):
        verdict += f", of the cases that ran; {late} did not"
    tested = ", the references themselves were tested" if run.plan.reference else ""
    print(f"{verdict}; fallback was forbidden in the cases of ops{tested}")


def print_unsupported(results: list[Any]) -> None:
    """Ops without a kernel, cases that no kernel serves with the reasons, and how many were one kernel's to refuse alone."""
    refused = [result for result in results if result.verdict == "unsupported"]
    unserved = sorted({result.op for result in refused if not result.provider})
    if unserved:
        print(f"no kernel   {', '.join(unserved)}")
    passed = {result.id for result in results if result.verdict == "pass"}
    served = {result.id for result in results if result.verdict != "unsupported"}
    reasons = Counter(result.reason for result in refused if result.provider and result.id not in served)
    for reason, count in reasons.items():
        print(f"unsupported {count} by every kernel of the op: {reason}")
    if elsewhere := sum(result.id in passed for result in refused):
        print(f"unsupported {elsewhere} by one kernel of the op, passed by another")


def hal_record(
    out: Annotated[Path, _option("File to write, NAME.trace.")],
    model: Annotated[str, _option("Folder of a checkpoint, or nano.")] = "nano",
    backend: Annotated[str, _option("Backend that the steps run on.")] = "auto",
    dtype: Annotated[str, _option("Of the residual streams: auto, bfloat16 or float32.")] = "auto",
    calls: Annotated[int, _option("Calls of an op with the same shapes that are kept.", min=1)] = 1,
    call_bytes: Annotated[int, _option("Calls with more bytes of tensors than this are passed over.", min=1)] = 8 << 20,
) -> int:
    """Saves the op calls of real model steps (a prefill in chunks, then decode), to be replayed by `hal test --trace`."""
    from deepinfer.hal_record import record_steps

    summary = record_steps(out, model, backend, dtype, calls, call_bytes)
    note(f"{out}: {summary['calls']} calls of {summary['ops']} ops, {out.stat().st_size / 1e6:.1f} MB")
    if summary["passed_over"]:
        note(f"passed over as too large: {', '.join(sorted(summary['passed_over']))}")
    return 0
