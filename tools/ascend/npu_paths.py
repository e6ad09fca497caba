"""Runs every path of the NPU device that calls torch_npu, over the stand-in, and gives the calls that it made.

The kernel library is left out: a library of kernels is handed a stream, and calls nothing of torch_npu.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_torch_npu
import torch
import torch.distributed as dist
from deepinfer_ascend import npu, npu_communicator, npu_graphs, npu_runtime
from deepinfer_ascend.backend import AscendBackend
from deepinfer_hal.communicator import World

PACKAGE = Path(npu.__file__).parent


def recorded() -> list[fake_torch_npu.Call]:
    """Every call of torch_npu that the backend makes, in the order in which its slots were run."""
    calls: list[fake_torch_npu.Call] = []
    before = sys.modules.get("torch_npu"), torch.Tensor.pin_memory, npu.unavailable_reason
    fake_torch_npu.install(calls)
    npu.unavailable_reason = lambda: None
    try:
        _run(AscendBackend())
    finally:
        real, torch.Tensor.pin_memory, npu.unavailable_reason = before
        if real is None:
            del sys.modules["torch_npu"]
        else:
            sys.modules["torch_npu"] = real
    return calls


def _run(backend: AscendBackend) -> None:
    backend.probe()
    backend.memory_info(0)
    backend.pinned_empty((2,), torch.uint8)
    stream, event = backend.stream(0), backend.event(0)
    event.record(stream)
    event.synchronize()
    backend.timer(0)()
    backend.synchronize(0)
    with backend.sync_guard(0):
        pass
    backend.proof_key(0)
    npu_runtime.open_device(0)
    npu_runtime.current_stream_pointer(0)
    npu_runtime.wait_bounded(0, 1.0)
    graph = npu_graphs.NpuGraphs(0).capture(lambda: None)
    graph.replay()
    graph.reset()
    _transfers()


def _transfers() -> None:
    """A world of one rank, made without its meeting, moves bytes to itself."""
    kind, store, world = npu_communicator.HcclCommunicator, dist.HashStore(), World(0, 1)
    rank = kind(world, store, kind._process_group(store, world), None, torch.device("cpu"))
    x, out = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    rank.all_gather(x, out[None])
    rank.all_to_all(x, [4], out, [4])
    rank.broadcast(x, 0)


def named_in_sources() -> set[str]:
    """Every dotted name below torch_npu that the package's sources use."""
    return {name for path in sorted(PACKAGE.glob("*.py")) for name in _names(ast.parse(path.read_text(encoding="utf-8")))}


def _names(tree: ast.AST) -> Iterator[str]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = _dotted(node)
            if name is not None and name.startswith("torch_npu."):
                yield name


def _dotted(node: Any) -> str | None:
    """a.b.c of an attribute chain that starts at a name, without what follows a call."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        below = _dotted(node.value)
        return None if below is None else f"{below}.{node.attr}"
    return None
