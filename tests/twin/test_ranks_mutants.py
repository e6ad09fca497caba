"""What orders the kernels of several ranks: each flag, barrier and meeting left out in turn is reported at its place."""

from __future__ import annotations

import functools
from pathlib import PurePath

import probes
import pytest
from deepinfer_ascend import twin
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend
from deepinfer_hal.conformance.rank_threads import run_threads

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

CHANGES = {"SyncAll": "drop", "PipeBarrier": "drop", "SetFlag": "forget"}
LOADS = (40, 9)

EQUIVALENT = {("ep_dispatch_kernel", "di_ranks.h", "SyncAll")}
"""The meeting behind the last verdict of ep_dispatch, after which nothing is told any more; ep_combine has one verdict more."""


def play() -> list:
    return run_threads(
        "tests.twin.rank_jobs:against_reference", 2, AscendBackend(), [TWIN_INDEX] * 2,
        params=dict(loads=LOADS, kind="holes", coded=True, weighed=True, seed=3),
    )  # fmt: skip


@functools.cache
def sites() -> list:
    """Places in di_ranks.h, and every meeting of all cores, that two ranks reach."""
    module = twin.module()
    module.record_sites()
    try:
        assert all(answer.ok for answer in play())
        found = module.recorded_sites()
    finally:
        module.stop_mutation()
    kept = [site for site in found if site.kind in CHANGES and site.kernel.startswith(("ep_", "(ep_"))]
    return [site for site in kept if PurePath(site.file).name == "di_ranks.h" or site.kind == "SyncAll"]


def test_leaving_out_what_orders_ranks_is_reported():
    module, silent = twin.module(), set()
    assert {site.kind for site in sites()} == set(CHANGES) and len(sites()) > 20
    for site in sites():
        module.mutate([site], CHANGES[site.kind])
        try:
            answers = play()
        finally:
            module.stop_mutation()
        if not any(answer.error == "BackendError" for answer in answers):
            silent.add((site.kernel, PurePath(site.file).name, site.kind))
    assert silent <= EQUIVALENT
