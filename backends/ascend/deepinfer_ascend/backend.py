"""The Ascend backend: NPUs through torch_npu, and the twin, a functional model of an Ascend 950 on CPU tensors.

Both run the AscendC kernels of this project through one C ABI. What passed on the twin is `emulated`; the NPU path is
`written`: it has never run on one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepinfer_hal import proofs
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo, MemoryInfo
from deepinfer_hal.card import all_cards
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from deepinfer_ascend import error_codes, npu, npu_library, npu_runtime, ranks, support, twin, vendor_ops
from deepinfer_ascend import weights as _weights

TWIN_INDEX = 1000
"""Index of the twin; NPUs count from 0, as torch_npu does."""


class AscendBackend(Backend):
    """Devices `npu` (0, 1, ...) and `twin`."""

    name = "ascend"

    def probe(self) -> list[DeviceInfo]:
        reason, cause, seen = npu.unavailable_reason(), None, []
        try:
            seen = npu.devices()
        except Exception as error:  # whatever the vendor's library raises: the twin must stay usable
            reason, cause = _import_failed(error), error
        found = [DeviceInfo(one.index, f"npu {one.name}", one.memory_bytes, _details(one)) for one in npu.usable(seen)]
        if twin.module() is not None:
            details = {"state": "emulated", "kernels": str(len(twin.ops()))}
            found.append(DeviceInfo(TWIN_INDEX, "twin", 0, details, emulated=True))
        if not found:
            reason = reason or str(npu.soc_part([one.name for one in seen]))
            raise BackendUnavailable(f"no NPU ({reason}); {twin.unavailable_reason()}") from cause
        return found

    def device(self, index: int) -> torch.device:
        if index == TWIN_INDEX:
            return torch.device("cpu")
        import torch_npu  # noqa: F401  (torch learns the name of its device)

        return torch.device("npu", index)

    def capabilities(self, index: int) -> Capabilities:
        emulated = index == TWIN_INDEX
        streams = (torch.bfloat16, torch.float32)
        return Capabilities(stream_dtypes=streams, synchronous=emulated, graphs=not emulated, float8=True)

    # -- compute

    def kernels(self, index: int) -> Sequence[Kernel]:
        if index != TWIN_INDEX:
            proven = proofs.proven_symbols(self.name, self.proof_key(index))
            vendor = [kernel for kernel in self.candidates(index) if kernel.symbol in proven]
            return [*npu_library.kernels(index, self.device(index)), *vendor]
        cards = all_cards()
        return [
            Kernel(op, "ascendc", twin.bind(cards[op]), f"di_{op}", "yes", priority=100, supports=support.answer)
            for op in twin.ops()
        ]

    def candidates(self, index: int) -> Sequence[Kernel]:
        return () if index == TWIN_INDEX else vendor_ops.kernels()

    def proof_key(self, index: int) -> Mapping[str, str]:
        if index == TWIN_INDEX:
            return {}
        soc = next((one.name for one in npu.devices() if one.index == index), "unknown")
        return {
            "soc": soc, "cann": npu_runtime.toolkit_version(), "torch_npu": npu.torch_npu_version() or "unknown",
            "mapping": vendor_ops.digest(),
        }  # fmt: skip

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        return _weights.prepare(role, canonical, self.device(index))

    def prepared_nbytes(self, role: str, shape: tuple[int, ...], format: str) -> int:
        return _weights.prepared_nbytes(role, shape, format)

    def communicator(self, index: int) -> type[Communicator] | None:
        if index == TWIN_INDEX:
            return ranks.TwinRank
        from deepinfer_ascend.npu_communicator import HcclCommunicator

        return HcclCommunicator

    def graphs(self, index: int) -> Any:
        if index == TWIN_INDEX:
            return None
        from deepinfer_ascend.npu_graphs import NpuGraphs

        return NpuGraphs(index)

    # -- memory, streams, time

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(0, 0) if index == TWIN_INDEX else npu_runtime.memory_info(index)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return npu_runtime.pinned_empty(shape, dtype) if self._has_npu else super().pinned_empty(shape, dtype)

    def stream(self, index: int) -> Any:
        return None if index == TWIN_INDEX else npu_runtime.stream(index)

    def event(self, index: int) -> Any:
        return None if index == TWIN_INDEX else npu_runtime.event()

    def mark(self, index: int) -> Any:
        return None if index == TWIN_INDEX else npu_runtime.mark(index)

    def timer(self, index: int) -> Callable[[], float]:
        return super().timer(index) if index == TWIN_INDEX else npu_runtime.timer(index)

    def synchronize(self, index: int) -> None:
        if index != TWIN_INDEX:
            npu_runtime.synchronize(index)

    @contextlib.contextmanager
    def sync_guard(self, index: int) -> Iterator[None]:
        with contextlib.nullcontext() if index == TWIN_INDEX else npu_runtime.sync_guard():
            yield

    def classify_error(self, error: BaseException) -> str:
        known = super().classify_error(error)
        return error_codes.classify(str(error)) if known == "unknown" else known

    def explain_error(self, text: str) -> Sequence[str]:
        return [line for meaning in error_codes.explain(text) for line in meaning.lines()]

    def describe_build(self) -> Mapping[str, str]:
        twin_state = twin.unavailable_reason() or f"emulated, {len(twin.ops())} AscendC kernels"
        return {
            "npu": f"written, never run; {_npu_state()}",
            "npu kernels": f"written, never built; {npu_library.part()}",
            "vendor ops": f"{len(vendor_ops.VENDOR_OPS)} mapped, {vendor_ops.OFF_UNTIL_PROVEN}",
            "twin": twin_state,
        }

    @functools.cached_property
    def _has_npu(self) -> bool:
        return any(not device.emulated for device in self.probe())


def _details(device: npu.NpuDevice) -> dict[str, str]:
    return {
        "state": "written", "soc": device.name, "cube_cores": str(device.cube_cores),
        "vector_cores": str(device.vector_cores), "cann": npu.toolkit_version() or "unknown",
        "torch_npu": npu.torch_npu_version() or "unknown",
    }  # fmt: skip


def _import_failed(error: Exception) -> str:
    told = f"torch_npu cannot tell its devices: {type(error).__name__}: {error}"
    explained = "; ".join(meaning.says for meaning in error_codes.explain(str(error)))
    return f"{told} ({explained})" if explained else told


def _npu_state() -> str:
    """What an NPU lacks here, or that nothing does."""
    missing = npu.unavailable_reason()
    if missing:
        return missing
    try:
        soc = npu.soc_part([one.name for one in npu.devices()])
    except Exception as error:  # as in probe
        return _import_failed(error)
    return "all parts are here" if soc.ok else str(soc)
