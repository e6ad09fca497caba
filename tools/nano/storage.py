"""Weights as their storage holds them: the straight-through rounding of training, and the bytes of export."""

from __future__ import annotations

from collections import defaultdict

import torch
from config import Tensor
from deepinfer_hal import formats


class _StraightThrough(torch.autograd.Function):
    """The rounded value going forward, the master's gradient going back."""

    @staticmethod
    def forward(ctx, master, rounded):
        return rounded.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _round(values: torch.Tensor, kind: str) -> torch.Tensor:
    """What reading a stored [rows, columns] tensor of this kind gives back, float32."""
    if kind == "fp8":
        return formats.dequantise_weight_fp8(*formats.quantise_weight_fp8(values))
    return formats.fake_quantise(values, "fp8_32" if kind == "fp8_rows" else "mxfp4_32")


def rounded_weights(masters: dict[str, torch.Tensor], table: dict[str, Tensor]) -> dict[str, torch.Tensor]:
    """Every master as its storage gives it back; the gradient passes straight through.

    Matrices of one kind and width are rounded in one call: blocks are 32 rows high, so stacking changes nothing when
    every height is a multiple of 32. Norm gains and embeddings round to BF16.
    """
    result, groups = {}, defaultdict(list)
    for name, master in masters.items():
        kind = table[name].kind
        if kind == "f32":
            result[name] = master
        elif kind == "bf16":
            result[name] = _StraightThrough.apply(master, master.detach().bfloat16().float())
        else:
            alone = name if master.shape[0] % formats.WEIGHT_BLOCK else ""
            groups[kind, master.shape[1], alone].append(name)
    for (kind, _, _), names in groups.items():
        stacked = torch.cat([masters[name].detach() for name in names])
        rounded = _round(stacked, kind).split([masters[name].shape[0] for name in names])
        for name, values in zip(names, rounded, strict=True):
            result[name] = _StraightThrough.apply(masters[name], values)
    return result


def stored_tensors(masters: dict[str, torch.Tensor], table: dict[str, Tensor]) -> dict[str, torch.Tensor]:
    """Name -> tensor in its on-disk dtype, `.scale` tensors included, on the CPU, in the table's order."""
    stored = {}
    for name, tensor in table.items():
        master = masters[name].detach().float().cpu()
        if tensor.kind in ("bf16", "f32"):
            stored[name] = master.to(torch.bfloat16 if tensor.kind == "bf16" else torch.float32).contiguous()
            continue
        if tensor.kind == "fp8":
            codes, scales = formats.quantise_weight_fp8(master)
        else:
            codes, scales = formats.quantise(master, "fp8_32" if tensor.kind == "fp8_rows" else "mxfp4_32")
        dtype = torch.int8 if tensor.kind == "fp4" else torch.float8_e4m3fn
        stored[name] = codes.contiguous().view(dtype)
        stored[name.removesuffix(".weight") + ".scale"] = scales.contiguous().view(torch.float8_e8m0fnu)
    return stored
