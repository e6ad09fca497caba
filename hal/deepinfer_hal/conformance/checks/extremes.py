"""Extreme magnitudes: tiny and huge rows, and group maxima on and beside the powers of two where scales change."""

import torch

from deepinfer_hal import formats
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import compare_discrete, compare_values
from deepinfer_hal.conformance.problem import Args, Problem

SCALABLE = {
    "linear": "x", "grouped_linear": "x", "grouped_gemm": "x", "rms_norm": "x", "rope": "x", "quantise": "x",
    "store_window_kv": "x", "store_compressed_kv": "x", "store_index_k": "x", "write_kv": "x", "store_draft_kv": "x",
    "hyper_connection_post": "y", "stream_collapse": "streams", "unpermute": "rows", "draft_features": "streams",
    "swiglu_quantise": "gate_up", "select_topk": "scores",
}  # fmt: skip
"""Op -> the input whose rows may have any magnitude without changing how well the result is determined."""

EXPONENTS = (-40, 30)
"""Powers of two that whole inputs are multiplied by; squares and sums of them stay inside float32."""

_LARGEST = {"fp8_32": 448.0, "fp4_16": 6.0, "mxfp4_32": 6.0}


def run(problem: Problem, profile: Profile) -> None:
    for args in (*(_scaled(problem, exponent) for exponent in EXPONENTS), _edge_groups(problem)):
        if args is None:
            continue
        expected, got = problem.reference(args), problem.run(args).args
        compare_values(problem, args, expected, got, problem.written)
        compare_discrete(problem, args, expected, got, problem.written)


def _scaled(problem: Problem, exponent: int) -> Args:
    name = SCALABLE[problem.card.name]
    x = problem.pristine[name]
    return {**problem.pristine, name: (x.float() * 2.0**exponent).to(x.dtype)}


def _edge_groups(problem: Problem) -> Args | None:
    """For ops that quantise their input as it is: maxima at largest * 2^j, one step below and above, and rounding ties."""
    name, format = SCALABLE[problem.card.name], problem.pristine.get("format")
    if format not in _LARGEST or problem.card.name in ("write_kv", "store_draft_kv"):
        return None
    x, group = problem.pristine[name], formats.GROUP_SIZE[format]
    dense = x.float().clone(memory_format=torch.contiguous_format)
    grouped = dense.view(dense.shape[0], -1, group)
    for row in range(grouped.shape[0]):
        for g in range(grouped.shape[1]):
            peak = torch.tensor(_LARGEST[format] * 2.0 ** ((row * 7 + g) % 13 - 6)).to(x.dtype)
            step = (row + g) % 3
            toward = torch.tensor((0.0, float("inf"))[step - 1] if step else float(peak)).to(x.dtype)
            edge = float(torch.nextafter(peak, toward))
            values = torch.linspace(-edge, edge, group)  # passes ties and both signs of the grid
            values[group // 2] = -0.0
            grouped[row, g] = values
    return {**problem.pristine, name: dense.to(x.dtype)}


def applies(problem: Problem) -> bool:
    name = SCALABLE.get(problem.card.name)
    return not problem.empty and name is not None and problem.pristine[name].is_floating_point() and problem.num_rows <= 66


CHECK = Check("extremes", "Casts saturate, scales are exact at their edges, and no magnitude overflows on the way.", run, applies)
