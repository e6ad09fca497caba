"""What the kernels are made for: the one place where an architecture decides a tile or the form of a product."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Target:
    """A kind of device and the choices that depend on it.

    dot: how quantised operands meet. "scaled": codes and scales go to the matrix unit as they are; "bf16": they are
    expanded to BF16 first, which is exact; "f32": everything is widened (Triton's interpreter miscomputes BF16
    products). features, tokens, depth: a GEMM tile's weight rows, activation rows and K. keys: keys that an attention
    step gathers. columns: width of a tile of the row-wise kernels; row_columns: up to this width a row is one tile;
    rope_heads: heads that a program turns. draft_heads, draft_keys, draft_columns: a draft block's query heads, keys of a step
    and columns of the output that a program has.
    """

    name: str
    dot: str
    features: int = 128
    tokens: int = 64
    depth: int = 128
    keys: int = 64
    columns: int = 1024
    row_columns: int = 8192
    rope_heads: int = 16
    gemm_warps: int = 4
    attention_warps: int = 8
    index_columns: int = 128
    head_group: int = 32
    draft_heads: int = 128
    draft_keys: int = 32
    draft_columns: int = 128
    draft_warps: int = 8


INTERPRETER = Target("interpreter", "f32", features=128, tokens=16, depth=256, head_group=64, draft_keys=64, draft_columns=256)
SM90 = Target("sm90", "bf16", depth=64, keys=16, head_group=16, draft_keys=64)
SM100 = Target("sm100", "scaled", keys=32)
SM103 = replace(SM100, name="sm103")
ASCEND950 = Target(
    "ascend950", "bf16", features=64, tokens=32, depth=64, keys=16, columns=512, row_columns=512, rope_heads=1,
    index_columns=64,
)  # fmt: skip

TARGETS = {target.name: target for target in (INTERPRETER, SM90, SM100, SM103, ASCEND950)}

CUDA_CAPABILITIES = {(9, 0): SM90, (10, 0): SM100, (10, 3): SM103}
"""Compute capability (major, minor) to target; a 10.3 device takes the tiles of 10.0."""


def cuda_target(major: int, minor: int) -> Target | str:
    """The target of an NVIDIA compute capability, or the sentence that says why there is none."""
    if (major, minor) in CUDA_CAPABILITIES:
        return CUDA_CAPABILITIES[major, minor]
    known = ", ".join(f"{one}.{other}" for one, other in CUDA_CAPABILITIES)
    return f"the Triton kernels are made for compute capabilities {known}, this device has {major}.{minor}"
