"""What the CUDA C++ kernels of linear and grouped_linear serve (kernels_cuda/linear.cu), by a call's statics."""

from __future__ import annotations

from deepinfer_hal.kernel import CallSpec, No, Yes

PAIRS = {("u8", "fp8_block32"): ("bf16", "f32", "u8"), ("bf16", "bf16"): ("bf16", "f32")}
"""Dtype of x and format of the weight: the dtypes of out."""


def serves_linear(call: CallSpec) -> Yes | No:
    """fp8_32 rows times FP8 weights of 32 x 32 blocks, and BF16 rows times BF16 weights, of any size; a quantised result needs N
    in multiples of 32."""
    x, weight, out, features = (call.statics.get(name) for name in ("x", "weight", "out", "N"))
    outputs = PAIRS.get((x, weight))
    if outputs is None:
        return No(f"x is {x!r} and weight {weight!r}; the kernel knows u8 (fp8_32) times fp8_block32, and bf16 times bf16")
    if out not in outputs:
        return No(f"out is {out!r}; the kernel knows {', '.join(outputs)} for x {x}")
    if out == "u8" and (features is None or features % 32):
        return No(f"out is u8 and N {features}; the kernel knows multiples of 32 for a quantised result")
    return Yes()
