"""Which calls the CUDA C++ kernels of a layer's small ops take; the Triton kernels take the others.

A binding that does not say what decides is refused, and asked again with the statics of the call.
"""

from __future__ import annotations

from deepinfer_hal.kernel import CallSpec, No, Yes


def serves_site(call: CallSpec) -> Yes | No:
    """hyper_connection_pre and residual_site: four BF16 streams, in groups of 32 columns."""
    for name, known in (("streams", "bf16"), ("out", "bf16"), ("m", 4)):
        if call.statics.get(name) != known:
            return No(f"{name} is {call.statics.get(name)!r}; the kernel knows {known!r}")
    hidden = call.statics.get("H")
    return Yes() if hidden is not None and hidden % 32 == 0 else No(f"H is {hidden}; the kernel takes multiples of 32")
