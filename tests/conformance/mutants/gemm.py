"""Matrix products: tails, scales, splits over K, rows of experts."""

from __future__ import annotations

import torch
from deepinfer_hal.conformance import CORE
from deepinfer_hal.ops import _common as c

from tests.conformance.mutants import right
from tests.conformance.mutants._base import QUICK, Mutant, changed, count_of, kernel, patched, spoiled, with_rows

PLAIN = "linear(T=5,K=64,N=32,x=bf16,w=bf16,out=f32)"
ROWS = "linear(T=21,K=64,N=32,x=f32,w=f32,out=f32)"
ODD = "linear(T=17,K=96,N=32,x=f32,w=f32,out=f32)"
CODED = "linear(T=3,K=96,N=64,x=u8,w=fp8_block32,out=f32)"
FAR = "linear(T=3,K=96,N=64,x=u8,w=fp8_block32,out=f32,far=-100..100)"
COUNTED = "linear(T=9,K=64,N=32,x=bf16,w=bf16,out=bf16,count=4)"
NONE = "linear(T=0,K=64,N=32,x=bf16,w=bf16,out=bf16)"
STRIDED = "linear(T=5,K=64,N=30,x=bf16,w=bf16,out=f32)"
EXPERTS = "grouped_gemm(M=9,E=8,K=64,N=32,x=f32,w=f32,out=f32,spare=3)"
GROUPS = "grouped_linear(T=3,G=2,K=64,N=32,x=f32,w=f32,out=f32)"


def tail_of_k_dropped(x, x_scale, weight, count, out, out_scale) -> None:
    whole = x.shape[1] // 64 * 64
    out.copy_((x[:, None, :whole].double() * weight.dequantise()[:, :whole].double()).sum(-1))


def tail_of_rows_dropped(args):
    whole = max(args["x"].shape[0] // 16 * 16, 1)
    return {"x": args["x"][:whole], "out": args["out"][:whole]}


def scales_of_the_next_group(args):
    return {"x_scale": args["x_scale"].roll(1, dims=1)}


def block_scales_transposed(weight, like):
    values = weight.canonical()
    scales = values.scales.flatten().roll(1).view(values.scales.shape)
    return c.wide(type(values)(values.format, values.values, scales).dequantise())


def accumulates_in_bf16(x, x_scale, weight, count, out, out_scale) -> None:
    total = torch.zeros(out.shape, dtype=torch.bfloat16)
    for start in range(0, x.shape[1], 16):
        part = slice(start, start + 16)
        total += (x[:, part].float() @ weight.dequantise()[:, part].float().T).bfloat16()
    out.copy_(total)


def split_by_batch(x, x_scale, weight, count, out, out_scale) -> None:
    """K in two halves for many rows, at once for few, each sum in FP32."""
    w, half = weight.dequantise(), x.shape[1] // 2
    if x.shape[0] >= 16:
        first, second = ((x[:, None, part] * w[:, part]).sum(-1) for part in (slice(0, half), slice(half, None)))
        out.copy_(first + second)
    else:
        for row, result in zip(x, out, strict=True):
            result.copy_((row * w).cumsum(-1)[:, -1])


def one_order(x, x_scale, weight, count, out, out_scale) -> None:
    """The same as `split_by_batch`, with one way for any number of rows."""
    for row, result in zip(x, out, strict=True):
        result.copy_((row * weight.dequantise()).cumsum(-1)[:, -1])


def in_half_precision(weight, like):
    """What FP16 holds of a weight's values."""
    return weight.dequantise().half().to(c.work_dtype(like))


def past_the_count(args) -> None:
    if args["count"] is not None and 0 < int(args["count"][0]) < args["out"].shape[0]:
        args["out"][int(args["count"][0])] = 0


def grid_of_nothing(*values) -> None:
    if values[0].shape[0] == 0 or count_of({"count": values[3]}, 1) == 0:
        raise RuntimeError("a grid of no blocks")
    right.linear(*values)


def accumulates(x, x_scale, weight, count, out, out_scale) -> None:
    before = out.clone()
    right.linear(x, x_scale, weight, count, out, out_scale)
    out += before.nan_to_num(0.0, 0.0, 0.0)


def vector_past_the_end(x, x_scale, weight, count, out, out_scale) -> None:
    """Whole vectors of four are stored; the last row's reaches over the end."""
    right.linear(x, x_scale, weight, count, out, out_scale)
    if out.shape[0]:
        past = out.as_strided((2,), (1,), out.storage_offset() + (out.shape[0] - 1) * out.stride(0) + out.shape[1])
        past.zero_()


def eats_its_input(args) -> None:
    args["x"].zero_()


def reads_the_padding(x, x_scale, weight, count, out, out_scale) -> None:
    """A tile's rows past the count take part with weight 0, which NaN survives."""
    right.linear(x, x_scale, weight, count, out, out_scale)
    if count is not None and int(count[0]):
        out[0] += (0 * x[int(count[0]) :].float().sum()).to(out.dtype)


def stride_ignored(args):
    x = args["x"]
    return {"x": x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())}


def output_stride_ignored(args):
    out = args["out"]
    return {"out": out.as_strided(out.shape, (out.shape[1], 1), out.storage_offset())}


class SeldomWrong:
    """Another bit in the 300th run, as a race gives it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *values) -> None:
        right.linear(*values)
        self.calls += 1
        if self.calls == 300:
            values[4].view(torch.int32)[0, 0] += 1


def empty_experts_skipped(args):
    """The n-th expert with rows gets the n-th matrix."""
    rows = args["offsets"].diff()
    kept = rows[rows > 0].cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), kept, kept[-1:].expand(rows.numel() - kept.numel())))
    return {"offsets": offsets.to(torch.int32)}


def spare_rows_too(args):
    offsets = args["offsets"].clone()
    offsets[-1] = args["x"].shape[0]
    return {"offsets": offsets}


def groups_swapped(args):
    x = args["x"]
    return {"x": x.unflatten(1, (2, -1)).flip(1).flatten(1)}


def mutant(name, case, fn, killed_by, why, base=right.linear_kernel, profile=QUICK) -> Mutant:
    return Mutant(name, "linear", case, lambda: kernel("linear", name, fn() if isinstance(fn, type) else fn, "yes"), killed_by,
                  why, right=base, profile=profile)  # fmt: skip


def from_reference(name, op, case, fn, killed_by, why) -> Mutant:
    return Mutant(name, op, case, lambda: kernel(op, name, fn), killed_by, why)


MUTANTS = [
    mutant("tail_of_k_dropped", ODD, with_rows("linear", tail_of_k_dropped), ("values", "extremes"),
           "What K has beyond a multiple of the tile is not added."),
    mutant("tail_of_rows_dropped", ODD, changed("linear", tail_of_rows_dropped, right.linear),
           ("values", "overwrite", "extremes", "batch"),
           "Rows beyond a multiple of the tile are not computed."),
    mutant("accumulates_in_bf16", ROWS, with_rows("linear", accumulates_in_bf16), ("values", "extremes"),
           "Partial sums are rounded to BF16."),
    mutant("split_depends_on_batch", ROWS, with_rows("linear", split_by_batch), ("batch",),
           "K is split in two for many rows, so a row's bits follow the size of its batch.",
           base=lambda: kernel("linear", "in_one_order", with_rows("linear", one_order), "yes")),
    from_reference("wrong_scale_group_of_x", "linear", CODED, changed("linear", scales_of_the_next_group), ("values",),
                   "Each group of activations is multiplied by its neighbour's scale."),
    from_reference("wrong_scale_block_of_weight", "linear", CODED, patched(
        "linear", "deepinfer_hal.ops._common.weight_values", block_scales_transposed), ("values",),
        "Each block of the weight is multiplied by its neighbour's scale."),
    from_reference("weights_in_half_precision", "linear", FAR, patched(
        "linear", "deepinfer_hal.ops._common.weight_values", in_half_precision), ("values",),
        "Weights are expanded to FP16, which holds few of the scales that a checkpoint may have."),
    mutant("writes_past_the_count", COUNTED, spoiled("linear", past_the_count, right.linear), ("untouched",),
           "The first row past the device's count is cleared."),
    mutant("crash_without_rows", NONE, grid_of_nothing, ("empty",),
           "A problem without rows is launched as a grid without blocks."),
    mutant("adds_to_old_output", PLAIN, accumulates, ("overwrite",),
           "The result is added to what the output held, which the caller never cleared."),
    mutant("vector_past_the_end", STRIDED, with_rows("linear", vector_past_the_end), ("sentinels",),
           "The last store is a whole vector and reaches past the output."),
    mutant("eats_its_input", PLAIN, spoiled("linear", eats_its_input, right.linear), ("inputs",),
           "The activation is used as scratch memory."),
    mutant("reads_past_the_count", COUNTED, reads_the_padding, ("poison",),
           "Rows past the count are multiplied by 0, which turns their NaN into everyone's."),
    mutant("input_stride_ignored", PLAIN, changed("linear", stride_ignored, right.linear), ("views",),
           "Rows of a wider buffer are read as if they were dense."),
    mutant("output_stride_ignored", PLAIN, changed("linear", output_stride_ignored, right.linear), ("views", "sentinels"),
           "Rows are written as if the output were dense."),
    mutant("seldom_another_bit", PLAIN, SeldomWrong, ("repeat",),
           "One run in hundreds gives another bit: a race.", profile=CORE),
    from_reference("empty_expert_shifts_the_rest", "grouped_gemm", EXPERTS, changed("grouped_gemm", empty_experts_skipped),
                   ("values", "extremes"), "An expert without rows is left out when matrices are counted."),
    from_reference("rows_past_the_offsets_written", "grouped_gemm", EXPERTS, changed("grouped_gemm", spare_rows_too),
                   ("untouched",), "Room for rows that nobody sent is computed as the last expert's."),
    from_reference("groups_swapped", "grouped_linear", GROUPS, changed("grouped_linear", groups_swapped),
                   ("values", "nan", "extremes"), "A group of columns goes through its neighbour's matrix."),
]  # fmt: skip

