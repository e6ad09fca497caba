"""The Ascend backend: NPUs through torch_npu, and the twin, a functional model of an Ascend 950 on CPU tensors.

Both run the AscendC kernels of this project through one C ABI. What passed on the twin is `emulated`; the NPU path is
`written`: it has never run on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo, MemoryInfo
from deepinfer_hal.card import all_cards
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from deepinfer_ascend import npu, support, twin
from deepinfer_ascend import weights as _weights

TWIN_INDEX = 1000
"""Index of the twin; NPUs count from 0."""


class AscendBackend(Backend):
    """Devices `npu` (0, 1, ...) and `twin`."""

    name = "ascend"

    def probe(self) -> list[DeviceInfo]:
        found = [
            DeviceInfo(index, f"npu {name}", memory, {"state": "written"})
            for index, (name, memory) in enumerate(npu.devices())
        ]
        if twin.module() is not None:
            details = {"state": "emulated", "kernels": str(len(twin.ops()))}
            found.append(DeviceInfo(TWIN_INDEX, "twin", 0, details, emulated=True))
        if not found:
            reason = npu.unavailable_reason() or "none is an Ascend 950"
            raise BackendUnavailable(f"no NPU ({reason}); {twin.unavailable_reason()}")
        return found

    def device(self, index: int) -> torch.device:
        return torch.device("cpu") if index == TWIN_INDEX else torch.device("npu", index)

    def capabilities(self, index: int) -> Capabilities:
        emulated = index == TWIN_INDEX
        return Capabilities(stream_dtypes=(torch.bfloat16, torch.float32), synchronous=emulated, float8=True)

    def kernels(self, index: int) -> Sequence[Kernel]:
        if index != TWIN_INDEX:
            return ()  # binding needs a build under CANN, which the bring-up makes; the references run
        cards = all_cards()
        return [
            Kernel(op, "ascendc", twin.bind(cards[op]), f"di_{op}", "yes", priority=100, supports=support.answer)
            for op in twin.ops()
        ]

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        if index == TWIN_INDEX:
            return _weights.TwinWeight(role, canonical)
        return super().prepare_weight(index, role, canonical)

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(0, 0) if index == TWIN_INDEX else super().memory_info(index)

    def describe_build(self) -> Mapping[str, str]:
        twin_state = twin.unavailable_reason() or f"emulated, {len(twin.ops())} AscendC kernels"
        return {"npu": f"written, never run; {npu.unavailable_reason() or 'all parts are here'}", "twin": twin_state}
