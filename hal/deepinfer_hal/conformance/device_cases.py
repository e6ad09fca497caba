"""Cases of a device as a whole: bytes survive the way there and back, plans arrive, clocks run, memory is told truly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from deepinfer_hal.backend import Backend
from deepinfer_hal.conformance.cases import SystemCase
from deepinfer_hal.conformance.verdict import CheckFailed, Declined
from deepinfer_hal.step import RatioMeta, StepMeta, plan_step


def device_cases() -> Iterator[SystemCase]:
    """One case per slot of the backend contract that moves data or tells a fact."""
    yield SystemCase("device(copies)", "Host bytes come back from the device as they went, asynchronous copies too.", _copies)
    yield SystemCase("device(step_plan)", "A step plan on the device is the plan of the host, and the plan is right.", _step_plan)
    yield SystemCase("device(capabilities)", "What a backend says of its device is complete and sound.", _capabilities)
    yield SystemCase("device(timer)", "The clock runs forwards and includes the device's work.", _timer)
    yield SystemCase("device(streams)", "Work on another stream is seen after its event, and not lost.", _streams)


def _copies(backend: Backend, index: int) -> None:
    device = backend.device(index)
    for nbytes in (0, 1, 31, 33, 4096, 1 << 20):
        host = backend.pinned_empty((nbytes,), torch.uint8)
        host.copy_((torch.arange(nbytes) * 37 % 256).to(torch.uint8))
        there, back = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.zeros(nbytes, dtype=torch.uint8)
        backend.copy_async(there, host)
        backend.synchronize(index)
        backend.copy_async(back, there)
        backend.synchronize(index)
        if not torch.equal(back, host):
            raise CheckFailed(f"{nbytes} bytes came back changed")


def _step_plan(backend: Backend, index: int) -> None:
    """Three requests, one longer than its ring, against the definition of every array, token by token."""
    cu_q = np.array([0, 1, 4, 164], np.int32)
    starts, slots = np.array([5, 0, 300], np.int32), np.array([2, 0, 1], np.int32)
    tables = np.array([[4, -1, -1, -1], [1, -1, -1, -1], [0, 2, 3, 5]], np.int32)
    window, ring, slot_rows = 128, 134, 134
    plan = plan_step(
        cu_q, starts, slots, tables, window=window, ring_rows=ring, slot_rows=slot_rows, ratios=(2,), block_tokens=128
    )  # fmt: skip
    device = backend.device(index)
    moved = plan.to(lambda array: torch.from_numpy(array).to(device))
    backend.synchronize(index)
    _assert_equal(plan, moved, "")
    for request, slot in enumerate(slots.tolist()):
        for row in range(cu_q[request], cu_q[request + 1]):
            position = int(starts[request] + row - cu_q[request])
            owner, at = int(plan.row_to_req[row]), int(plan.positions[row])
            if (owner, at) != (request, position):
                raise CheckFailed(f"row {row} of the plan is request {owner} at {at}, must be {request} at {position}")
            stored = int(plan.window_base[request] + (position - plan.window_origin[request]) % plan.window_modulo[request])
            if stored != int(plan.window_slots[row]):
                raise CheckFailed(f"row {row} is stored in window row {int(plan.window_slots[row])}, but read from {stored}")
            if int(plan.ring_slots[row]) not in (-1, slot * slot_rows + position % ring):
                raise CheckFailed(f"row {row} has ring row {int(plan.ring_slots[row])} outside its request's ring")


def _assert_equal(plan: StepMeta | RatioMeta, moved: StepMeta | RatioMeta, prefix: str) -> None:
    for name, value in vars(plan).items():
        there = getattr(moved, name)
        if isinstance(value, np.ndarray):
            if not np.array_equal(there.cpu().numpy(), value):
                raise CheckFailed(f"{prefix}{name} of the step plan is not the same on the device")
        elif name == "ratios":
            for ratio, meta in value.items():
                _assert_equal(meta, there[ratio], f"ratio {ratio}, ")
        elif there != value:
            raise CheckFailed(f"{prefix}{name} of the step plan changed from {value} to {there}")


def _capabilities(backend: Backend, index: int) -> dict[str, object]:
    capabilities, info = backend.capabilities(index), backend.memory_info(index)
    if not capabilities.stream_dtypes:
        raise CheckFailed("capabilities name no stream dtype")
    if min(info.free_bytes, info.total_bytes) < 0 or info.free_bytes > info.total_bytes:
        raise CheckFailed(f"memory_info says {info.free_bytes} of {info.total_bytes} bytes are free")
    if capabilities.graphs and backend.graphs(index) is None:
        raise CheckFailed("capabilities offer graphs, but the graphs slot is empty")
    return {"stream_dtypes": [str(d).removeprefix("torch.") for d in capabilities.stream_dtypes], "graphs": capabilities.graphs}


def _timer(backend: Backend, index: int) -> None:
    clock = backend.timer(index)
    times = [clock() for _ in range(5)]
    if times != sorted(times):
        raise CheckFailed(f"the clock ran backwards: {times}")
    device = backend.device(index)
    a = torch.ones(256, 256, device=device)
    start = clock()
    for _ in range(4):
        a = a + 1
    if not clock() > start:
        raise CheckFailed("the clock did not advance while the device worked")


def _streams(backend: Backend, index: int) -> None:
    stream, event = backend.stream(index), backend.event(index)
    if stream is None or event is None:
        raise Declined("the backend has no streams; everything is in order")
    device = backend.device(index)
    source, target = torch.arange(1 << 16, device=device), torch.zeros(1 << 16, dtype=torch.int64, device=device)
    backend.synchronize(index)
    with stream:
        target.copy_(source)
        event.record(stream)
    event.synchronize()
    if not torch.equal(target.cpu(), source.cpu()):
        raise CheckFailed("a copy on a second stream was not done when its event was")
