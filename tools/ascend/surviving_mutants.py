"""Why each mutant that no report names may live. tests/twin/test_mutants.py holds this list to the stored report, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Survivor:
    """Mutants of one place (empty fields match anything) and the reason."""

    kernel: str
    file: str
    kind: str
    detail: str
    change: str
    why: str

    def matches(self, result: Mapping) -> bool:
        """Whether a result of the report is one of these."""
        fields = ("kernel", "kind", "detail", "change")
        return result["file"].endswith(self.file) and all(getattr(self, f) in ("", result[f]) for f in fields)


_RANKS = (
    "this run has one rank, which has no flags to send and one header to read; with two ranks the mutant is reported "
    "(tests/twin/test_ranks_mutants.py)."
)
_MOVED = (
    "equivalent where a group moves rows: the queue that moves them orders the same buffers. A group without a valid expert "
    "moves none, and then the flag is needed; no case has two such groups on a core."
)
SURVIVORS = (
    Survivor(
        "",
        "",
        "InitBuffer",
        "",
        "up",
        "equivalent: a queue of depth 1 may have one buffer or two (a double buffer). The second one costs local memory and "
        "changes neither order nor values.",
    ),
    Survivor(
        "select_candidate_blocks_kernel",
        "select.asc",
        "SetFlag",
        "V_MTE2",
        "forget",
        "equivalent in this kernel alone: between two chunks a count is read by the scalar unit, which issues the next load. "
        "select_topk uses the helper without that, and its mutant is caught.",
    ),
    *(
        Survivor(kernel, file, kind, detail, change, why)
        for kernel in ("ep_dispatch_kernel", "ep_combine_kernel")
        for file, kind, detail, change, why in (
            ("ep.asc", "SyncAll", "", "drop", _RANKS),
            ("di_ranks.h", "PipeBarrier", "MTE3", "drop", _RANKS),
            ("di_ranks.h", "SetFlag", "S_MTE3", "forget", _RANKS),
            ("di_ranks.h", "SetFlag", "S_MTE2", "forget", _RANKS),
        )
    ),
    Survivor(
        "ep_dispatch_kernel",
        "di_ranks.h",
        "SyncAll",
        "",
        "drop",
        "equivalent in this kernel alone: it keeps what cores tell of one verdict apart from the next, and the last verdict of "
        "ep_dispatch has no next. ep_combine has, and its mutant is caught.",
    ),
    *(Survivor("ep_dispatch_kernel", "ep.asc", "SetFlag", detail, "forget", _MOVED) for detail in ("S_MTE2", "MTE3_S")),
    Survivor(
        "coded_kernel",
        "di_cube.h",
        "SetFlag",
        "MTE1_MTE2",
        "forget",
        "not reached: no small case with a quantised result gives one core a fourth chunk, which would use a stage of L1 again. "
        "The same line's mutant in cube_kernel, which shares the code, is caught.",
    ),
    Survivor(
        "coded_kernel",
        "di_encode.h",
        "mask",
        "",
        "drop",
        "caught, a few lines off: without the mask, lanes that nothing has written reach the store, which the report names.",
    ),
)


def reason(result: Mapping) -> str | None:
    """Why a result's mutant may survive, or None."""
    return next((s.why for s in SURVIVORS if s.matches(result)), None)
