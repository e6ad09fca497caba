"""Which kernel of a part a composite is held against, where a backend has several."""

import torch
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.conformance.plan import subjects
from deepinfer_hal.kernel import Kernel, No, Yes
from deepinfer_hal.weights import prepare_canonical

RAN = []


def norm(name, known, priority):
    def run(*args):
        RAN.append(name)
        get_card("rms_norm").reference(*args)

    def supports(call):
        return Yes() if call.statics.get("x") in known else No(f"x is {call.statics.get('x')}")

    return Kernel("rms_norm", name, run, f"{name}::rms_norm", priority=priority, supports=supports)


class TwoNorms(Backend):
    """A fast kernel for BF16 alone, and a portable one."""

    name = "two-norms"

    def probe(self):
        return [DeviceInfo(0, "host", 1 << 30, {})]

    def device(self, index):
        return torch.device("cpu")

    def capabilities(self, index):
        return Capabilities(stream_dtypes=(torch.bfloat16, torch.float32), synchronous=True)

    def kernels(self, index):
        return [norm("fast", ("bf16",), 100), norm("portable", ("bf16", "f32", None), 50)]


def test_a_part_is_the_kernel_that_serves_the_call_at_hand():
    found = subjects(TwoNorms(), 0, False)
    part = found["rms_norm", "fast::rms_norm"].part("rms_norm")
    RAN.clear()
    for dtype in ("bf16", "f32"):
        card = get_card("rms_norm")
        args = card.generate(Case("rms_norm", dict(T=2, N=64, x=dtype, out=dtype, w=dtype)), 0, "cpu", prepare_canonical)
        part(*args.values())
    assert RAN == ["fast", "portable"]
