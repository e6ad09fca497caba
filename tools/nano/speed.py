"""Makes the reference network train faster on a GPU without changing what it computes.

Constants that it rebuilds on every call are kept on the device, and its small pointwise functions are compiled, since
launching their kernels one by one costs more than running them.
"""

from __future__ import annotations

from deepinfer_hal import formats

from deepinfer.model import reference, reference_ops

COMPILED = ((reference_ops, ("mhc_coefficients", "collapse_streams", "update_streams", "rms_norm", "rope")),
            (reference, ("_swiglu",)), (formats, ("fake_quantise",)))
ATTENTION = ((reference_ops, ("_attend_chunk",)),)


def keep_constants() -> None:
    """Rotation frequencies once per configuration and device."""
    if hasattr(reference_ops.rope_frequencies, "kept"):
        return
    make = reference_ops.rope_frequencies
    known: dict = {}

    def rope_frequencies(config, compressed, device):
        yarn = tuple(sorted((k, str(v)) for k, v in config.rope_scaling.items()))
        key = (config.rope_theta, config.compress_rope_theta, config.qk_rope_head_dim, yarn, compressed, str(device))
        if key not in known:
            known[key] = make(config, compressed, device)
        return known[key]

    rope_frequencies.kept = known
    reference_ops.rope_frequencies = rope_frequencies


class Compiled:
    """While entered, the named functions run compiled; leaving restores them (evaluation has too many shapes)."""

    def __init__(self, wanted: bool, attention: bool = False) -> None:
        self.plan = (COMPILED + (ATTENTION if attention else ())) if wanted else ()
        self.saved: list = []

    def __enter__(self) -> Compiled:
        import torch._dynamo

        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.recompile_limit = 64
        for module, names in self.plan:
            for name in names:
                plain = getattr(module, name)
                self.saved.append((module, name, plain))
                setattr(module, name, torch.compile(plain))
        return self

    def __exit__(self, *_) -> None:
        for module, name, plain in self.saved:
            setattr(module, name, plain)
        self.saved = []
