"""The NPU device over a stand-in for torch_npu, with host memory for the device's: what tests and their workers open.

Nothing here runs on an NPU; it is the logic of the slots, of the library's binding and of proofs that is tested.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import torch
from deepinfer_ascend import npu, npu_library, twin
from deepinfer_ascend.backend import AscendBackend
from deepinfer_ascend.npu_communicator import HcclCommunicator
from deepinfer_hal import proofs, registry
from deepinfer_hal.card import get_card
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.kernel import Kernel

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/ascend"))
import fake_torch_npu  # noqa: E402

TORCH_NPU = "2.13.0"


def stand_in(soc: str = fake_torch_npu.SOC, cann: str = fake_torch_npu.CANN, torch_npu: str = TORCH_NPU) -> list:
    """Puts the stand-in in place for this process; the list receives its calls."""
    calls: list[fake_torch_npu.Call] = []
    fake_torch_npu.install(calls, soc, cann)
    npu.unavailable_reason = lambda: None
    npu.torch_npu_version = lambda: torch_npu
    return calls


class HcclOnHost(HcclCommunicator):
    """Two ranks may use the one device of the stand-in."""

    shares_devices = True


class NpuOnHost(AscendBackend):
    """Device 0 is the stand-in's; its tensors are the host's."""

    name = "ascend"

    def __init__(self) -> None:
        if "torch_npu" not in sys.modules:  # in a worker or a rank
            stand_in()

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def communicator(self, index: int) -> type[Communicator]:
        return HcclOnHost


def open_with_library(spec: str):
    """The NPU device with the twin's library in the place of the one that CANN would build; its description is `spec`."""
    stand_in()
    npu_library.LIBRARY = Path(twin.module().__file__)
    npu_library.description = lambda: json.loads(spec)
    return NpuOnHost(), 0


def open_with_a_fault(spec: str):
    """The NPU device with one kernel that fails as a device does, once in all: the file `spec` remembers. From then on
    nothing works in that process."""
    stand_in()
    card, dead = get_card("stream_collapse"), []

    def faulty(*args):
        if dead or not Path(spec).exists():
            Path(spec).touch()
            dead.append(True)
            raise RuntimeError("ACL stream synchronize failed, error code:507035")
        card.reference(*args)

    class Faulty(NpuOnHost):
        def kernels(self, index: int) -> Sequence[Kernel]:
            return [Kernel(card.name, "faulty", faulty, "faulty")]

    return Faulty(), 0


def open_candidates(spec: str):
    """The NPU device's candidates, with vendor ops in plain torch: `right`, or `wrong` by what they leave out."""
    define_vendor_ops(spec)
    if "torch_npu" not in sys.modules:
        stand_in()
    return proofs.with_candidates(NpuOnHost()), 0


def define_vendor_ops(spec: str) -> None:
    """npu::npu_mhc_post for host tensors, once a process."""
    if hasattr(torch.ops.npu, "npu_mhc_post"):
        return
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("npu_mhc_post(Tensor x, Tensor? h_res, Tensor h_out, Tensor h_post) -> Tensor")

    def post(x, h_res, h_out, h_post):
        mixed = torch.einsum("tik,tih->tkh", h_res, x.float())
        if spec == "right":
            mixed = mixed + h_post[:, :, None] * h_out.float()[:, None]
        return mixed.to(x.dtype)

    library.impl("npu_mhc_post", post, "CPU")
    define_vendor_ops.kept = library


def generate(backend: str, tokens: int) -> list[int]:
    """Greedy tokens of nano with the references forbidden: `ascend:0` is the NPU device over the twin's library, bound as
    CANN's would be, `ascend:twin` the twin. The NPU's comes first in a process: the twin's own binding then minds the
    bounds of its own calls. The stand-in's graphs record nothing, so nothing is captured."""
    from deepinfer import LLM, SamplingParams

    if backend == "ascend:0":
        open_with_library(json.dumps({"architecture": "dav-3510", "cann": "9.2.0"}))
        entry = EntryPoint("ascend", f"{__name__}:NpuOnHost", registry.GROUP)
        registry._entries = lambda: {"ascend": entry}
    llm = LLM("nano", backend=backend, max_model_len=128, fallback="forbid", enforce_eager=True)
    (output,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=tokens))
    return list(output.outputs[0].token_ids)
