"""What every reference and case generator shares: working precision, valid rows, rounding into outputs, seeded inputs.

A reference computes in float32 and rounds where its card says. Inside `float64_reference()` the same functions compute
in float64 with the same rounding points, which is what results are compared with; so a reference widens with `wide`
and never with `.float()`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from deepinfer_hal import formats
from deepinfer_hal.card import Case, Cost, Tolerance, default_cost, sum_tolerance
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

Prepare = Callable[[str, CanonicalWeight], WeightHandle]

_work: list[torch.dtype] = [torch.float32]

POISON_BYTE = 0xAA
"""Every byte of a poisoned integer output; float outputs are NaN."""


@contextlib.contextmanager
def float64_reference() -> Iterator[None]:
    """References called inside compute in float64; rounding points stay. For tests, not thread safe."""
    _work.append(torch.float64)
    try:
        yield
    finally:
        _work.pop()


def work_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 inside `float64_reference` or if any tensor is float64, else float32."""
    doubles = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if doubles else _work[-1]


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the working precision (see `work_dtype`)."""
    return x.to(work_dtype(x))


def valid_rows(count: torch.Tensor | None, rows: int) -> int:
    """Rows that an op may read and write: `count[0]` clamped to 0..rows, or all of them."""
    return rows if count is None else max(0, min(int(count[0]), rows))


def load_rows(x: torch.Tensor, x_scale: torch.Tensor | None, rows: int | None = None) -> torch.Tensor:
    """The first `rows` rows of a dense or fp8_32-quantised activation in the working precision."""
    x = x[:rows]
    if x.dtype != torch.uint8:
        return wide(x)
    if x_scale is None:
        raise BadCall("a uint8 activation needs its scales; x_scale is None")
    return wide(formats.dequantise(x, x_scale[:rows], "fp8_32"))


def write_result(
    out: torch.Tensor, out_scale: torch.Tensor | None, value: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """Rounds `value` once into the first valid rows of `out`: a cast, or fp8_32 codes and scales if out is uint8.

    `value` may already be cut to the valid rows.
    """
    n = min(valid_rows(count, out.shape[0]), value.shape[0])
    if out.dtype != torch.uint8:
        out[:n] = value[:n].to(out.dtype)
        return
    if out_scale is None:
        raise BadCall("a uint8 output needs room for its scales; out_scale is None")
    if n:
        codes, scales = formats.quantise(value[:n], "fp8_32")
        out[:n], out_scale[:n] = codes, scales


def check_pairs(op: str, args: Mapping[str, Any], *pairs: tuple[str, str]) -> None:
    """Each (values, scales) pair: scales are given exactly when values are uint8. BadCall otherwise."""
    for values, scales in pairs:
        value, scale = args.get(values), args.get(scales)
        coded = value is not None and value.dtype == torch.uint8
        if coded and scale is None:
            raise BadCall(f"{op}: {values} is uint8, so {scales} must be given")
        if scale is not None and not coded:
            raise BadCall(f"{op}: {scales} is given, so {values} must be uint8 codes")


def largest(x: torch.Tensor, x_scale: torch.Tensor | None = None) -> float:
    """Largest finite magnitude of a dense or quantised activation: the size of terms in a tolerance."""
    if x.numel() == 0:
        return 0.0
    values = load_rows(x, x_scale).float()
    return float(torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).abs().max())


def matmul_tolerance(args: Mapping[str, Any], name: str) -> Tolerance:
    """Of x W^T with the arguments x, x_scale, weight and out: an FP32 sum of K products, rounded once."""
    weight, out = args["weight"], args["out"]
    return sum_tolerance(torch.float32 if out.dtype == torch.uint8 else out.dtype, weight.shape[-1], largest_product(args))


def largest_product(args: Mapping[str, Any]) -> float:
    """The largest magnitude of x times that of the weight in the same 32 columns, which share scales: those of other columns
    never meet, and may lie as far apart as exponents reach."""
    weight, x = args["weight"], args["x"]
    if x.numel() == 0:
        return 0.0
    values = torch.nan_to_num(load_rows(x, args["x_scale"]).float(), nan=0.0, posinf=0.0, neginf=0.0).abs().amax(0).cpu()
    columns = weight.dequantise().abs().amax(-2).cpu()  # [K], or [G or E, K]; x and the weight may be on different devices
    if columns.numel() != values.numel():
        columns = columns.amax(0)  # experts, whose columns are the same of x
    products = [
        torch.nn.functional.pad(one.view(-1, weight.shape[-1]), (0, -weight.shape[-1] % 32)).unflatten(-1, (-1, 32)).amax(-1)
        for one in (values, columns)
    ]
    return float((products[0] * products[1]).max())


def matmul_cost(args: Mapping[str, Any]) -> Cost:
    """Every argument once, but only the experts that have rows; 2 T N K FLOPs for T rows through each matrix [N, K] they meet."""
    weight, rows, total = args["weight"], args["x"].shape[0], default_cost(args).bytes
    if "offsets" not in args:
        return Cost(total, 2 * rows * math.prod(weight.shape))
    idle = int((args["offsets"].diff() == 0).sum())
    return Cost(total - weight.nbytes * idle // weight.shape[0], 2 * rows * math.prod(weight.shape[-2:]))


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis by halving: bits depend on the row alone, whatever the other axes and thread count are."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        paired = x[..., :half] + x[..., half : 2 * half]
        x = paired if x.shape[-1] % 2 == 0 else torch.cat((paired, x[..., 2 * half :]), dim=-1)
    return x[..., 0]


def weight_values(weight: WeightHandle, like: torch.Tensor | None = None) -> torch.Tensor:
    """All values of a weight in the working precision of `like`, on its device."""
    values = weight.dequantise()
    return values.to(work_dtype(like)) if like is None else values.to(like.device, work_dtype(like))


def weight_rows(weight: WeightHandle, rows: torch.Tensor) -> torch.Tensor:
    """Values of the given rows (int, all valid) of a 2-D weight, without expanding the whole of it."""
    stored = weight.canonical()
    index = rows.long().to(stored.values.device)
    if stored.format in ("bf16", "f32"):
        return wide(stored.values[index]).to(rows.device)
    if stored.format == "fp8_block32":
        scales = stored.scales[index // formats.WEIGHT_BLOCK]
        width = stored.values.shape[1]
        spread = formats.E8M0_VALUES(scales.device)[scales.long()].repeat_interleave(formats.WEIGHT_BLOCK, 1)[:, :width]
        return wide(formats.E4M3_VALUES(scales.device)[stored.values[index].long()] * spread).to(rows.device)
    row_format = "fp8_32" if stored.format == "fp8_row32" else "mxfp4_32"
    return wide(formats.dequantise(stored.values[index], stored.scales[index], row_format)).to(rows.device)


# ------------------------------------------------------------------------------------------- inputs for cases


def generator(case: Case, seed: int) -> torch.Generator:
    """A CPU generator that depends on the case's id and the seed only."""
    import zlib

    return torch.Generator().manual_seed((zlib.crc32(case.id.encode()) << 16) ^ seed)


def normal(
    gen: torch.Generator,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    scale: float = 1.0,
) -> torch.Tensor:
    """Normal values times `scale`, the same on every device."""
    return (torch.randn(shape, generator=gen) * scale).to(dtype).to(device)


def integers(
    gen: torch.Generator,
    low: int,
    high: int,
    *shape: int,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Uniform integers in low..high-1, the same on every device."""
    return torch.randint(low, high, shape, generator=gen).to(dtype).to(device)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A fresh output: NaN for floats, 0xAA bytes for integers."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    bytes_ = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON_BYTE, dtype=torch.uint8)
    return bytes_.view(dtype).to(device)


def poisoned_pair(rows: int, width: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Room for fp8_32 codes [rows, width] and scales [rows, width/32]."""
    u8 = torch.uint8
    return poisoned(rows, width, dtype=u8, device=device), poisoned(rows, width // 32, dtype=u8, device=device)


def strided(x: torch.Tensor, extra: int = 32) -> torch.Tensor:
    """A copy of x [T, N] as a view of a wider buffer, so that stride(0) is N + extra."""
    wider = torch.zeros(*x.shape[:-1], x.shape[-1] + extra, dtype=x.dtype, device=x.device)
    view = wider[..., : x.shape[-1]]
    view.copy_(x)
    return view


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8_32 codes and scales of x [T, K], also for T = 0."""
    if x.shape[0] == 0:
        return x.new_zeros(x.shape, dtype=torch.uint8), x.new_zeros((0, x.shape[-1] // 32), dtype=torch.uint8)
    return formats.quantise(x, "fp8_32")


def count_tensor(count: int | None, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """The device count of a case: i32[1], or None for all rows."""
    return None if count is None else torch.tensor([count], dtype=torch.int32, device=device)


def dtype_of(name: str) -> torch.dtype:
    """torch dtype of the names used in case parameters: bf16, f32, u8."""
    return {"bf16": torch.bfloat16, "f32": torch.float32, "u8": torch.uint8}[name]


_drawn: list[dict[Any, CanonicalWeight]] = []
_MOST_DRAWN = 6


@contextlib.contextmanager
def weights_drawn_once() -> Iterator[None]:
    """Inside, `make_weight` draws a format, shape and scale once and gives the same values again; the last few are kept.

    For measurements, where the same large weights meet several numbers of rows. Not thread safe.
    """
    _drawn.append({})
    try:
        yield
    finally:
        _drawn.pop()


def make_weight(
    prepare: Prepare,
    role: str,
    fmt: str,
    gen: torch.Generator,
    *shape: int,
    scale: float | None = None,
    device: torch.device | str = "cpu",
) -> WeightHandle:
    """A handle of a random weight [..., N, K] in a checkpoint format; values about `scale` (default K^-0.5)."""
    if not _drawn:
        return prepare(role, _draw_weight(fmt, gen, shape, scale, device))
    kept, key = _drawn[-1], (fmt, shape, scale, str(device))
    stored = kept.pop(key) if key in kept else _draw_weight(fmt, gen, shape, scale, device)
    kept[key] = stored
    if len(kept) > _MOST_DRAWN:
        del kept[next(iter(kept))]
    return prepare(role, stored)


def far_scales(span: str | None, gen: torch.Generator, x_scale: torch.Tensor | None, prepare: Prepare) -> Prepare:
    """Moves the scales of x, each 32 columns by a power of two of their own out of `span`, e.g. "-100..100", and gives a
    `prepare` that moves a weight's the other way: no product changes its size. None: all stay as they are."""
    if span is None or x_scale is None:
        return prepare
    least, greatest = map(int, span.split(".."))
    powers = torch.randint(least, greatest + 1, x_scale.shape[-1:], generator=gen).to(x_scale.device)
    powers[0], powers[-1] = least, greatest
    x_scale.copy_(x_scale.int() + powers)

    def moved(role: str, stored: CanonicalWeight) -> WeightHandle:
        """Columns of x are those of every matrix, or, where x has as many as all matrices, of one each."""
        own = powers.view(-1, 1, stored.scales.shape[-1]) if len(powers) > stored.scales.shape[-1] else powers
        return prepare(role, CanonicalWeight(stored.format, stored.values, (stored.scales.int() - own).to(torch.uint8)))

    return moved


def _draw_weight(fmt: str, gen: torch.Generator, shape: tuple[int, ...], scale: float | None, device: Any) -> CanonicalWeight:
    dense = normal(gen, *shape, scale=shape[-1] ** -0.5 if scale is None else scale)
    if fmt in ("bf16", "f32"):
        return CanonicalWeight(fmt, dense.to(dtype_of(fmt)).to(device))
    row, column = torch.arange(shape[-2])[:, None] // 32, torch.arange(shape[-1]) // 32
    dense *= 2.0 ** -((row + 2 * column) % 3)  # scales of neighbours differ, so a wrong one shows
    if fmt == "fp8_block32":
        pairs = [formats.quantise_weight_fp8(part) for part in dense.reshape(-1, *shape[-2:])]
    else:
        row_format = "mxfp4_32" if fmt == "fp4_row32" else "fp8_32"
        pairs = [formats.quantise(part, row_format) for part in dense.reshape(-1, *shape[-2:])]
    values, scales = (torch.stack(parts).to(device) for parts in zip(*pairs, strict=True))
    if len(shape) == 2:
        values, scales = values[0], scales[0]
    return CanonicalWeight(fmt, values, scales)
