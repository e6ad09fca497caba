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
        "S_V",
        "forget",
        "equivalent in this kernel alone: the flag closes the shared helper Pick, and the kernel's own S_V after the block "
        "maxima orders the same accesses. select_topk uses the helper without that flag, and its mutant is caught.",
    ),
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
