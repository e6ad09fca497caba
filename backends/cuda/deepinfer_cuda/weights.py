"""Weights of the CUDA backend: FP4 experts as fragments of Hopper's matrix instruction, everything else as the checkpoint; an
FP8 weight with codes that are NaN says so in its format, since the CUDA C++ kernels do not read them.

Fragments (DI_LAYOUT_WGMMA_FP4) of a matrix [N, K], N a multiple of 64 and K of 128: for each 128 of K and each granule of 64
rows there is one block of 4352 bytes, as many as the checkpoint's; granules that a kernel takes together lie together:

- codes, 2 x 128 x 4 words of 32 bits: for each 64 of K, each thread of a warpgroup (warp w, lane 4 q + c), each 16 of K one
  word. It holds rows 16 w + q and 16 w + q + 8, columns 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of those 16, bit by bit at the places
  from where the kernel moves them into two BF16 at once (`_PLACES`)
- scales, 2 x 32 x 4 bytes: for each 64 of K, each pair of rows (w, q), the groups of 32: both rows of the first, both of the
  second; a ue8m0 code plus 126, which is the BF16 exponent that the kernel multiplies with

So a warpgroup reads 16 bytes a thread for 64 of K. A scale above 128 (2) is a factor that BF16 does not hold: a weight with one
keeps the checkpoint's layout, as does a matrix of other sizes.
"""

from __future__ import annotations

import functools

import torch
from deepinfer_hal.c_abi import pack_tensor
from deepinfer_hal.c_abi import pack_weight as pack_canonical
from deepinfer_hal.errors import BadCall, Unsupported
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

LAYOUT_WGMMA_FP4 = 4
"""DI_LAYOUT_WGMMA_FP4 of hal.h."""

GRANULE, BLOCK = 64, 128
CODE_BYTES, SCALE_BYTES = GRANULE * BLOCK // 2, GRANULE * BLOCK // 32
BLOCK_BYTES = CODE_BYTES + SCALE_BYTES
LARGEST_SCALE = 128
_SHIFT = 126

_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14))
"""Where the sign, the exponent's two bits and the mantissa of a word's four even columns lie; odd columns 16 further."""


def is_packed(role: str, format: str, shape: tuple[int, ...]) -> bool:
    """Whether this role's weight becomes fragments (scales permitting). It has as many bytes then as in the checkpoint."""
    whole = len(shape) == 3 and 0 not in shape and shape[1] % GRANULE == 0 and shape[2] % BLOCK == 0
    return whole and role.startswith("experts_") and format == "fp4_row32"


def blocks(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Experts, blocks along K and granules of rows of a weight of logical shape [E, N, K]."""
    experts, rows, columns = shape
    return experts, columns // BLOCK, rows // GRANULE


def prepare(role: str, canonical: CanonicalWeight) -> WeightHandle:
    """The handle of a weight on its own device; an expert at a time, so that little beyond the result is held."""
    if not is_packed(role, canonical.format, canonical.shape) or bool((canonical.scales.view(torch.uint8) > LARGEST_SCALE).any()):
        return WeightHandle(role, canonical)
    packed = torch.empty((*blocks(canonical.shape), BLOCK_BYTES), dtype=torch.uint8, device=canonical.values.device)
    for expert, (values, scales) in enumerate(zip(canonical.values, canonical.scales, strict=True)):
        packed[expert] = pack_matrix(values.view(torch.uint8), scales.view(torch.uint8))
    return FragmentWeight(role, canonical.shape, packed)


def pack_matrix(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, granules, 4352] of codes [N, K/2] and scales [N, K/32], no scale above 128."""
    _, depth, granules = blocks((1, values.shape[0], values.shape[1] * 2))
    codes = torch.stack((values & 15, values >> 4), dim=-1).view(granules, 4, 2, 8, depth, 2, 4, 2, 4, 2)
    # granule, warp, upper, q, block, half, step, far, c, odd  ->  block, granule, half, warp, q, c, step; far, upper; odd
    codes = codes.permute(4, 0, 5, 1, 3, 8, 6, 7, 2, 9)
    words = torch.zeros(codes.shape[:7], dtype=torch.int32, device=values.device)
    table = _spread_table(values.device)
    for pair in range(4):
        for odd in range(2):
            words |= table[pair][odd][codes[..., pair // 2, pair % 2, odd].int()]
    # granule, warp, upper, q, block, half, group -> block, granule, half, warp, q, group, upper
    groups = (scales + _SHIFT).view(granules, 4, 2, 8, depth, 2, 2).permute(4, 0, 5, 1, 3, 6, 2)
    packed = torch.empty((depth, granules, BLOCK_BYTES), dtype=torch.uint8, device=values.device)
    packed[..., :CODE_BYTES] = words.reshape(depth, granules, -1).view(torch.uint8)
    packed[..., CODE_BYTES:] = groups.reshape(depth, granules, SCALE_BYTES)
    return packed


def unpack_matrix(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K/2] and scales uint8 [N, K/32] of a packed matrix: the inverse of `pack_matrix`."""
    depth, granules, _ = packed.shape
    words = packed[..., :CODE_BYTES].contiguous().view(torch.int32).view(depth, granules, 2, 4, 8, 4, 4)
    codes = torch.empty((*words.shape, 2, 2, 2), dtype=torch.uint8, device=packed.device)
    for pair, places in enumerate(_PLACES):
        for odd in range(2):
            bits = [(words >> place + 16 * odd & 1) << bit for place, bit in zip(places, (3, 2, 1, 0), strict=True)]
            codes[..., pair // 2, pair % 2, odd] = functools.reduce(torch.bitwise_or, bits).to(torch.uint8)
    codes = codes.permute(1, 3, 8, 4, 0, 2, 6, 7, 5, 9).reshape(granules * GRANULE, depth * BLOCK)
    groups = packed[..., CODE_BYTES:].reshape(depth, granules, 2, 4, 8, 2, 2).permute(1, 3, 6, 4, 0, 2, 5)
    scales = groups.reshape(granules * GRANULE, depth * BLOCK // 32) - _SHIFT
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


@functools.cache
def _spread_table(device: torch.device) -> tuple[tuple[torch.Tensor, ...], ...]:
    """[pair][odd]: int32 [16], the bits of a word for every e2m1 code."""
    tables = []
    for places in _PLACES:
        pair = []
        for odd in range(2):
            bits = [(place + 16 * odd, bit) for place, bit in zip(places, (3, 2, 1, 0), strict=True)]
            words = [sum((code >> bit & 1) << place for place, bit in bits) for code in range(16)]
            pair.append(torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32, device=device))
        tables.append(tuple(pair))
    return tuple(tables)


class FragmentWeight(WeightHandle):
    """FP4 experts in fragments: `packed` uint8 [E, blocks, granules, 4352], without E for one expert."""

    def __init__(self, role: str, shape: tuple[int, ...], packed: torch.Tensor) -> None:
        self.role, self.shape, self.packed_bytes, self.format = role, tuple(shape), packed, "fp4_row32"

    @property
    def nbytes(self) -> int:
        return self.packed_bytes.numel()

    def canonical(self) -> CanonicalWeight:
        if len(self.shape) == 2:
            return CanonicalWeight("fp4_row32", *unpack_matrix(self.packed_bytes))
        values, scales = zip(*(unpack_matrix(one) for one in self.packed_bytes), strict=True)
        return CanonicalWeight("fp4_row32", torch.stack(values), torch.stack(scales))

    def slot(self, index: int) -> WeightHandle:
        if len(self.shape) != 3:
            raise BadCall(f"weight {self.role} has shape {list(self.shape)}: only stacked weights have slots")
        if not 0 <= index < self.shape[0]:
            raise BadCall(f"weight {self.role} has {self.shape[0]} slots, asked for {index}")
        return FragmentWeight(self.role, self.shape[1:], self.packed_bytes[index])

    def packed(self) -> tuple[bytes, bytes]:
        """Its two tensors behind the C ABI: the scales are inside the values."""
        return pack_tensor(self.packed_bytes, shape=self.shape, layout=LAYOUT_WGMMA_FP4), pack_tensor(None)


NAN_CODE = 0x7F
"""Of e4m3, but for the sign."""


def nan_codes(stored: CanonicalWeight) -> str:
    """How many codes of an FP8 weight are NaN, and where the first is; empty if none is. No quantiser writes one, and the CUDA
    C++ kernels that expand codes to BF16 would take it for 480."""
    if stored.format != "fp8_block32":
        return ""
    nan = stored.values.view(torch.uint8) & NAN_CODE == NAN_CODE
    return f"{int(nan.sum())} codes that are NaN, the first at {nan.nonzero()[0].tolist()}" if bool(nan.any()) else ""


class NanWeight(WeightHandle):
    """An FP8 weight with codes that are NaN, in the checkpoint's layout. A kernel's `supports` is told its format, which is none
    that a CUDA C++ kernel knows, so that the Triton kernel serves it, whose sums are NaN where they should be."""

    FORMAT = "fp8_block32 with NaN"

    def __init__(self, role: str, canonical: CanonicalWeight) -> None:
        super().__init__(role, canonical)
        self.format = self.FORMAT

    def slot(self, index: int) -> WeightHandle:
        return NanWeight(self.role, super().slot(index).canonical())


def stored_values(weight: WeightHandle) -> torch.Tensor:
    """The tensor that holds a handle's values as they are stored."""
    return weight.packed_bytes if isinstance(weight, FragmentWeight) else weight.canonical().values


def pack_weight(weight: WeightHandle) -> tuple[bytes, bytes]:
    """Values and scales of any handle of this backend behind the C ABI. Unsupported for one with codes that are NaN, which only
    a call gets here that was bound as one of another format."""
    if isinstance(weight, NanWeight):
        raise Unsupported(f"weight {weight.role!r} has codes that are NaN, which the CUDA C++ kernels do not read as such")
    return weight.packed() if isinstance(weight, FragmentWeight) else pack_canonical(weight)
