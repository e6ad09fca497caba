"""Kernels that take their process with them: the run must say so and go on in a fresh one."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer_hal.backend import Backend
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance import Plan, run_suite
from deepinfer_hal.conformance.verdict import CaseResult

from tests.conformance.mutants._base import Host, kernel

OPENER = f"{__name__}:open_mutants"
LIMIT_SECONDS = 5.0


@dataclass(frozen=True)
class ProcessMutant:
    """What the kernel of `op` does, the verdict it must get, and words that the report has for it."""

    name: str
    op: str
    case: str
    does: Callable[[], None]
    killed_by: tuple[str, ...]
    told: str
    why: str


def hang() -> None:
    while True:
        time.sleep(0.05)


RIGHT_OP, RIGHT_CASE = "top_logprobs", "top_logprobs(S=1,V=1,k=1)"
"""Runs after all mutants, in the last of the processes."""

MUTANTS = [
    ProcessMutant("segfault", "copy_rows", "copy_rows(rows=1,bytes=528,skip=0)", lambda: ctypes.string_at(0), ("crash",),
                  "SIGSEGV", "The kernel reads address 0."),
    ProcessMutant("leaves", "load_kv", "load_kv(rows=1,D=512,format=fp8_32,block_rows=0,dtype=bf16)", lambda: os._exit(3),
                  ("crash",), "exit status 3", "A vendor's library ends the process."),
    ProcessMutant("hang", "nan_row_flags", "nan_row_flags(S=1,V=1)", hang, ("timeout",), "time limit",
                  "The kernel waits for a flag that nobody sets."),
]  # fmt: skip


def run_all() -> dict[str, CaseResult]:
    """case -> result of every mutant and of the right kernel after them, in one run."""
    cases = (*(mutant.case for mutant in MUTANTS), RIGHT_CASE)
    plan = Plan(opener=OPENER, cases=cases, checks=("claims",), case_seconds=LIMIT_SECONDS)
    return {result.id: result for result in run_suite(plan).results}


def open_mutants(spec: str) -> tuple[Backend, int]:
    """The backend with all of them."""

    def broken(does: Callable[[], None]) -> Callable[..., None]:
        return lambda *values: does()

    def right(*values: Any) -> None:
        get_card(RIGHT_OP).reference(*values)

    kernels = [kernel(mutant.op, mutant.name, broken(mutant.does)) for mutant in MUTANTS]
    return Host(*kernels, kernel(RIGHT_OP, "nothing", right)), 0
