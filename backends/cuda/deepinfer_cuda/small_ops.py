"""Which calls the CUDA C++ kernels of a layer's small ops and of sampling take; the Triton kernels take the others.

A binding that does not say what decides is refused, and asked again with the statics of the call.
"""

from __future__ import annotations

from deepinfer_hal.kernel import CallSpec, No, Yes


def serves_site(call: CallSpec) -> Yes | No:
    """hyper_connection_pre and residual_site: four BF16 streams, in groups of 32 columns."""
    for name, known in (("streams", "bf16"), ("out", "bf16"), ("m", 4)):
        if call.statics.get(name) != known:
            return No(f"{name} is {call.statics.get(name)!r}; the kernel knows {known!r}")
    if call.statics.get("y") not in (None, "bf16"):
        return No(f"y is {call.statics['y']!r}; the kernel knows 'bf16'")
    hidden = call.statics.get("H")
    return Yes() if hidden is not None and hidden % 32 == 0 else No(f"H is {hidden}; the kernel takes multiples of 32")


def _only(call: CallSpec, **known: str) -> No | None:
    """A refusal where a static is not the one value that the kernel serves."""
    for name, value in known.items():
        if call.statics.get(name) != value:
            return No(f"{name} is {call.statics.get(name)!r}; the kernel knows {value!r}")
    return None


def serves_quantise(call: CallSpec) -> Yes | No:
    """quantise: BF16 rows to fp8_32."""
    return _only(call, x="bf16", format="fp8_32") or Yes()


def serves_swiglu(call: CallSpec) -> Yes | No:
    """swiglu_quantise: BF16 rows to codes of fp8_32."""
    return _only(call, gate_up="bf16", out="u8") or Yes()


MOST_CHOICES = 8
"""Experts of a token whose rows unpermute adds."""


def serves_unpermute(call: CallSpec) -> Yes | No:
    """unpermute: BF16 rows of multiples of eight columns, up to MOST_CHOICES a token."""
    refused = _only(call, rows="bf16", out="bf16")
    if refused or call.statics.get("shared") not in (None, "bf16"):
        return refused or No(f"shared is {call.statics['shared']!r}; the kernel knows 'bf16'")
    k, hidden = call.statics.get("k"), call.statics.get("H")
    if k is None or k > MOST_CHOICES:
        return No(f"k is {k}; the kernel takes up to {MOST_CHOICES}")
    return Yes() if hidden is not None and hidden % 8 == 0 else No(f"H is {hidden}; the kernel takes multiples of 8")


MOST_EXPERTS, MOST_TAKEN = 512, 8
"""Experts that route_topk scores, and takes of a row."""


def serves_route(call: CallSpec) -> Yes | No:
    """route_topk: up to MOST_TAKEN of up to MOST_EXPERTS experts."""
    for name, most in (("E", MOST_EXPERTS), ("k", MOST_TAKEN)):
        size = call.statics.get(name)
        if size is None or size > most:
            return No(f"{name} is {size}; the kernel takes up to {most}")
    return Yes()


MOST_BEST = 256
"""Tokens of a row that top_logprobs puts in order."""


def serves_top_logprobs(call: CallSpec) -> Yes | No:
    """top_logprobs: up to MOST_BEST tokens a row."""
    k = call.statics.get("k")
    return Yes() if k is not None and k <= MOST_BEST else No(f"k is {k}; the kernel takes up to {MOST_BEST}")
