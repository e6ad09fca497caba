"""Why each mutant that no report names may live; tests/twin/test_kernel_mutants.py holds this list to the report, both ways."""

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


_MOVED = (
    "equivalent where a group moves rows: the queue that moves them orders the same buffers. A group without a valid expert "
    "moves none, and then the flag is needed; no case has two such groups on a core."
)
_LOCKSTEP = (
    "equivalent in today's schedule: a vector core decodes piece p only when it has added up piece p - 2, so kScoresReady and "
    "the flags behind it already say that every second buffer is free, and kKeysReady, set later by the same pipe, that the "
    "query is there. The flags count on their own, so that the schedule can change without a race."
)
_MASKED = (
    "caught, a few lines off: the lanes that the mask leaves out hold nothing that was written, and the report names the store "
    "of all lanes that they reach."
)
_OTHER_COUNTER = (
    "caught by a deadlock that names other waits: the wrong counter is one that is filled too, so the core that took it goes on, "
    "and the cores that miss a count are named."
)
_SHARED = (
    "equivalent in this kernel alone: the helper is shared, and verify_drafts meets another S_V before the vector unit writes "
    "there again. sample meets none, and its mutant is caught."
)
_LATER = "equivalent: a later flag of the same pipe and event, set for the keys, is waited for before anything is used."
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
    *(
        Survivor("score_index_kernel", "score_index.asc", kind, detail, "forget", _LOCKSTEP)
        for kind, detail in (("SetFlag", "FIX_M"), ("CrossCoreSetFlag", "mode 2"))
    ),
    Survivor("sparse_attention_kernel", "sparse_attention.asc", "SetFlag", "MTE2_V", "forget", _LATER),
    Survivor(
        "sparse_attention_kernel",
        "sparse_attention.asc",
        "CrossCoreSetFlag",
        "mode 2",
        "forget",
        "equivalent: kQueryReady is implied by kKeysReady, which the same pipe sets after it and the cube waits for before it "
        "reads either; kScoresFree by kWeightsReady, since a place for scores is used again only behind products with the "
        "weights that were made from them. Each counts on its own, so that the schedule can change without a race.",
    ),
    *(
        Survivor("sparse_attention_kernel", "sparse_attention.asc", "CrossCoreWaitFlag", pipe, "up", _OTHER_COUNTER)
        for pipe in ("MTE3", "FIX")
    ),
    Survivor("residual_site_kernel", "hyper_connection.asc", "mask", "", "drop", _MASKED),
    Survivor(
        "coded_kernel",
        "di_cube.h",
        "SetFlag",
        "MTE1_MTE2",
        "forget",
        "not reached: no small case with a quantised result gives one core a fourth chunk, which would use a stage of L1 again. "
        "The same line's mutant in cube_kernel, which shares the code, is caught.",
    ),
    Survivor("verify_drafts_kernel", "di_sampling.h", "SetFlag", "S_V", "forget", _SHARED),
    Survivor(
        "verify_drafts_kernel",
        "di_philox.h",
        "SetFlag",
        "S_V",
        "forget",
        "not shown: in all cases another S_V lies between two draws, the only use of this helper. The flag keeps it right alone.",
    ),
)


def reason(result: Mapping) -> str | None:
    """Why a result's mutant may survive, or None."""
    return next((s.why for s in SURVIVORS if s.matches(result)), None)
