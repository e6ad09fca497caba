"""Mutation of the AscendC kernels on the twin: each flag, barrier, queue step, buffer count and mask changed in turn.

python tools/ascend/mutate.py [--kernel NAME]... [--op NAME]... [--jobs N]
    [--every N] [--json FILE]

A kernel is a launched function, such as rms_norm_kernel. For each mutant a child process runs a few small conformance cases
on one and two cube cores. It is caught if the twin reports something or a result differs from the unchanged kernel's.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools/ascend", "hal", "backends/cpu", "backends/ascend")]

import mutant_cases  # noqa: E402
import mutants  # noqa: E402
import torch  # noqa: E402
from deepinfer_ascend import twin  # noqa: E402

SECONDS = 60  # a child's time


def _judge(mutant: mutants.Mutant, sites: list, ready: list, partners: mutants.Partners) -> dict:
    """Runs the cases with the change in place until one shows it."""
    twin.module().mutate(sites, mutant.change)
    outcome, message = "survived", ""
    for case in ready:
        report, same = case.run()
        if report:
            found = mutants.names(report, mutant, partners)
            if found != "elsewhere":
                return {"outcome": found, "message": report.splitlines()[0]}
            outcome, message = found, report.splitlines()[0]
        elif not same and outcome == "survived":
            outcome, message = "value", ""
    return {"outcome": outcome, "message": message}


def _start(job: tuple, ready: list, partners: mutants.Partners) -> tuple[int, int]:
    """Forks a child for a mutant; gives its id and the pipe that its verdict comes through."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        signal.alarm(SECONDS)
        torch.set_num_threads(1)  # torch replaces the threads that a child does not have; cases of several ranks cannot
        os.close(reading)
        os.write(writing, json.dumps(_judge(*job, ready, partners)).encode()[:60000])
    finally:
        os._exit(0)


def _finish(child: int, reading: int) -> dict:
    text = b""
    while part := os.read(reading, 65536):
        text += part
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        hung = os.WTERMSIG(status) == signal.SIGALRM
        return {"outcome": "hung" if hung else "crashed", "message": f"signal {os.WTERMSIG(status)}"}
    return json.loads(text)


def run_mutants(
    jobs: list[tuple], ready: list, partners: mutants.Partners, processes: int
) -> Iterator[tuple[mutants.Mutant, dict]]:
    """Mutants and verdicts of (mutant, sites) pairs, in the order in which they come."""
    waiting, running = list(reversed(jobs)), {}
    while waiting or running:
        while waiting and len(running) < processes:
            job = waiting.pop()
            child, reading = _start(job, ready, partners)
            running[reading] = (child, job[0])
        for reading in select.select(list(running), [], [])[0]:
            child, mutant = running.pop(reading)
            yield mutant, _finish(child, reading)


def record_of(mutant: mutants.Mutant, verdict: dict) -> dict:
    """A mutant and its verdict as the report has them, with paths from the project's root."""
    return {
        **asdict(mutant),
        "file": str(Path(mutant.file).relative_to(ROOT)),
        "also": [str(Path(place).relative_to(ROOT)) for place in mutant.also],
        "outcome": verdict["outcome"],
        "message": verdict["message"].replace(f"{ROOT}/", ""),
    }


def _sites(chosen: Iterable) -> list:
    """Sites of some cases; of a site that several reach, the one with a partial mask."""
    sites: dict[tuple, object] = {}
    for found in chosen:
        for site in found.sites:
            key = (site.kernel, site.file, site.line, site.kind, site.detail)
            if key not in sites or site.highest > sites[key].highest:
                sites[key] = site
    return list(sites.values())


def mutate(kernels: list[str], found: list, processes: int, every: int = 1) -> Iterator[tuple[str, list[str], list[dict]]]:
    """For each kernel: its name, the cases that were run, and the records of (every n-th of) its mutants. What survives the
    chosen cases meets all others too, and the chosen ones with bad rows."""
    for kernel in kernels:
        chosen = mutant_cases.choose(found, kernel)
        rest = [f for f in found if kernel in f.kernels and f not in chosen]
        ready = mutant_cases.make_ready(chosen)
        partners = mutants.Partners(pair for f in [*chosen, *rest] for pair in f.partners)
        sites = [site for site in _sites(chosen) if site.kernel == kernel]
        jobs = mutants.mutants_of(sites, partners)
        jobs = sorted(jobs, key=lambda job: job[0].id)[::every]
        results = dict(run_mutants(jobs, ready, partners, processes))
        survivors = [job for job in jobs if results[job[0]]["outcome"] == "survived"]
        if survivors:
            more = [*mutant_cases.make_ready(rest), *mutant_cases.make_ready(chosen, bad_rows=True)]
            results |= dict(run_mutants(survivors, more, partners, processes))
        yield kernel, [f.case.id for f in chosen], [record_of(mutant, results[mutant]) for mutant, _ in jobs]


OUTCOMES = (*mutants.CAUGHT, "survived", "crashed", "hung")


def line_of(name: str, row: dict) -> str:
    """A row of the table that goes to the terminal."""
    counts = [row["outcomes"].get(outcome, 0) for outcome in OUTCOMES]
    share = (counts[0] + counts[1]) / max(1, row["mutants"])
    return f"{name:32s} {row['sites']:5d} {row['mutants']:7d} " + " ".join(f"{n:9d}" for n in counts) + f" {share:7.1%}"


def print_not_named(results: list[dict]) -> None:
    """One line for each mutant that no report names."""
    for result in results:
        if result["outcome"] not in ("site", "ends"):
            mutant = mutants.Mutant(**{name: result[name] for name in mutants.Mutant.__annotations__})
            print(f"{result['outcome']}: {mutant.id}  {result['message'][:300]}")


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", action="append", help="a launched function; all of them by default")
    parser.add_argument("--op", action="append", help="only cases of these ops")
    parser.add_argument("--jobs", type=int, default=2, help="child processes at once")
    parser.add_argument("--every", type=int, default=1, help="only every n-th mutant of a kernel")
    parser.add_argument("--json", type=Path, help="where the report goes")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of(sys.argv[1:])
    if twin.module() is None:
        print(twin.unavailable_reason())
        return 1
    torch.set_num_threads(1)
    begun = time.monotonic()
    found = [*mutant_cases.explore(options.op or twin.ops()), *(() if options.op else mutant_cases.explore_ranks())]
    known = sorted({kernel for f in found for kernel in f.kernels})
    unknown = sorted(set(options.kernel or ()) - set(known))
    if unknown:
        print(f"no case launches {', '.join(unknown)}; there are {', '.join(known)}")
        return 1
    print(f"{len(found)} cases of {len({f.op for f in found})} ops launch {len(known)} kernels")
    print(f"{'kernel':32s} sites mutants " + " ".join(f"{word:>9s}" for word in OUTCOMES) + "   named")
    cases, results = {}, []
    for kernel, ids, verdicts in mutate(options.kernel or known, found, options.jobs, options.every):
        cases[kernel] = ids
        results += verdicts
        if verdicts:
            print(line_of(kernel, mutants.summary(verdicts)["kernels"][kernel]), flush=True)
    counts, seconds = mutants.summary(results), round(time.monotonic() - begun)
    print(line_of("all", counts["total"]), f"{seconds} s", sep="\n")
    print_not_named(results)
    if options.json:
        command = " ".join(["python", "tools/ascend/mutate.py", *sys.argv[1:]])
        report = {"command": command, "seconds": seconds, **counts, "cases": cases, "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
