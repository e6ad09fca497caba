"""The AscendC kernels as CANN's compiler built them, bound through the C ABI. State: `written`, never built or run.

`tools/ascend/build_npu.sh` makes `libdeepinfer_npu.so` beside this file, with a JSON file that says for which
architecture and with which CANN. It exports the symbols of the twin's library, made from the same sources.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepinfer_hal.c_abi import CLibrary
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.workspaces import StreamWorkspaces

from deepinfer_ascend import npu, npu_runtime, support

LIBRARY = Path(__file__).with_name("libdeepinfer_npu.so")
ARCHITECTURE = "dav-3510"
WORKSPACE_BYTES = 64 << 20
"""What the kernels' host part may use of a device; the twin's is as large."""


def description() -> dict[str, Any]:
    """What build_npu.sh wrote of the library: architecture, cann, sources, ... BackendUnavailable if it cannot be read."""
    path = LIBRARY.with_suffix(".json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendUnavailable(f"{path} does not describe the kernel library ({error}); build it again") from error
    return found if isinstance(found, dict) else {}


def part() -> npu.Part:
    """Whether there is a library for this architecture, in the words of `hal list`."""
    wanted = f"{LIBRARY.name} for {ARCHITECTURE}"
    if not LIBRARY.is_file():
        return npu.Part("kernel library", wanted, "none (tools/ascend/build_npu.sh builds it where CANN is)", False)
    try:
        told = description()
    except BackendUnavailable as error:
        return npu.Part("kernel library", wanted, str(error), False)
    architecture, cann = told.get("architecture", "no architecture"), told.get("cann", "unknown")
    found = f"{architecture}, built with CANN {cann}"
    if told.get("failed"):
        found += f", without {', '.join(told['failed'])}, which did not compile"
    if sources_digest() not in (None, told.get("sources")):
        found += ", from other sources than those beside it: build it again"
    return npu.Part("kernel library", wanted, found, architecture == ARCHITECTURE)


def sources_digest() -> str | None:
    """Of the kernels' sources as build_npu.sh reads them, or None where the package is not in its source tree."""
    folder = Path(__file__).resolve().parents[3] / "kernels_ascendc"
    if not folder.is_dir():
        return None
    groups = (folder.glob("*.asc"), folder.glob("*.h"), (folder / "npu/include").glob("*.h"))
    text = b"".join(path.read_bytes() for group in groups for path in sorted(group))
    return hashlib.sha256(text).hexdigest()[:16]


@functools.cache
def library(index: int, device: torch.device) -> CLibrary:
    """The library bound to a device: calls go to the stream that is current there."""
    npu_runtime.open_device(index)
    stream = functools.partial(npu_runtime.current_stream_pointer, index)
    workspace = StreamWorkspaces(device, WORKSPACE_BYTES)
    return CLibrary(LIBRARY, stream=stream, pack_weight=lambda handle: handle.packed(), workspace=workspace)


def kernels(index: int, device: torch.device) -> Sequence[Kernel]:
    """One kernel for every op that the library exports; none while there is no library for this architecture.

    Ops between ranks are left out: their kernels reach into windows of other ranks, which nothing here opens on NPUs.
    Their references run over HCCL.
    """
    if not part().ok:
        return ()
    statements = {"invariant": "yes", "capturable": True, "priority": 100, "supports": support.answer}
    made = library(index, device).kernels("ascendc", **statements)
    return [kernel for kernel in made if "comm" not in get_card(kernel.op).arg_names]
