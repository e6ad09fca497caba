"""Calls that an AscendC kernel does not serve though its op has one, with the reason."""

from __future__ import annotations

from deepinfer_hal.kernel import CallSpec, No, Yes

ROW_FORMATS = ("format", "window_format", "compressed_format")
"""Arguments that name the format of stored rows."""


def answer(call: CallSpec) -> Yes | No:
    """Yes, unless what is known of the call names something that no kernel here handles."""
    for name, value in call.statics.items():
        if value == "f64":
            return No(f"{name} is float64, which the vector unit does not have")
        if value == "bf16" and name in ROW_FORMATS:
            return No(f"{name}: its kernels read and write rows of the quantised formats and of f32, not of bf16")
    return Yes()
