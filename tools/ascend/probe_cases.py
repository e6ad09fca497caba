"""The probes of the bring-up: every instruction of the twin's table that a chip can be asked about, with stored inputs.

Inputs come from one seed. Products have whole numbers as operands, so that every order of summation gives the same
bits; how a chip orders sums is asked by probes of their own, whose answer is only told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from probe_kernels import CONTIGUOUS, CUBE, EMPTY, OTHER, ROUND, TYPES, VECTOR, Probe, image

SEED = 20261129
ITEMS = 192

UNITS = {"Div": 1, "Reciprocal": 1, "Sqrt": 1, "Rsqrt": 2, "Exp": 2, "Ln": 3}
"""What a page allows (1) and what the twin itself is off."""

_FLOATS, _WHOLE = ("float", "half"), ("int32_t", "int16_t")
_NUMBERS = (*_FLOATS, "bfloat16_t", *_WHOLE)
_TYPES = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min", "Adds", "Muls", "Maxs", "Mins", "Duplicate"), _NUMBERS),
    **dict.fromkeys(("Div", "MulAddDst", "Exp", "Ln", "Abs", "Reciprocal", "Sqrt", "Rsqrt", "LeakyRelu", "Axpy"), _FLOATS),
    **dict.fromkeys(("And", "Or", "Xor", "Not"), ("uint16_t", "int16_t")),
    **dict.fromkeys(("ShiftLeft", "ShiftRight"), ("uint32_t", "int32_t", "uint16_t", "int16_t")),
    "Relu": ("float", "half", "int32_t"),
    "Neg": ("float", "half", "int32_t"),
    "Copy": ("uint16_t", "uint32_t"),
}
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.17549435e-38, 3.4028235e38, 1.0, -1.0, 2.0]


def probes() -> list[Probe]:
    """All of them, in the order in which they should be run: copies and flags first, then vectors, registers, the cube."""
    return [*_flags(), *_scalars(), *_vectors(), *_others(), *_registers(), *_maths(), *_products()]


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng([SEED, *name.encode()])


def _values(name: str, dtype: str, items: int = ITEMS) -> np.ndarray:
    """Values that an instruction of this type can be asked about: no overflow in sums and products."""
    kind, rng = TYPES[dtype][1], _rng(name)
    if dtype in ("float", "half", "bfloat16_t"):
        return rng.standard_normal(items).astype(np.float32).astype(kind)
    low = 0 if dtype.startswith("u") else -90
    return rng.integers(low, 90, items).astype(kind)


# ---------------------------------------------------------------------------------------- flags and copies


def _flags() -> Iterator[Probe]:
    """Padded copies, one core; then flags between cores, barriers and atomics on as few as they need."""
    rows = 9
    x = _rng("pad").integers(0, 1000, rows * 7).astype(np.int32)
    yield _sync("DataCopyPad", 7, 1, rows, x)
    for name, which, blocks, rounds in (
        ("SyncAll", 0, 4, 3), ("CrossCore.mode0", 1, 4, 3), ("SetAtomicAdd", 2, 6, 0), ("SetAtomicMax", 3, 6, 0),
        ("CrossCore.mode1", 4, 2, 0), ("CrossCore.mode4", 5, 2, 0), ("SyncAll.mix", 6, 2, 0),
    ):  # fmt: skip
        yield _sync(name, which, blocks, rounds, np.zeros(8, np.int32))


def _sync(name: str, which: int, blocks: int, rounds: int, x: np.ndarray) -> Probe:
    tensors = (image(x), image(np.zeros(1024, np.int32)))
    return Probe(f"sync.{name}", "probe_sync", tensors, 1, (which, blocks, rounds), view="int32_t")


def _scalars() -> Iterator[Probe]:
    """Queues, and what the scalar unit reads and writes."""
    for number, name, rows, items in ((0, "queues", 5, 320), (1, "values", 40, 40)):
        x = _rng(name).integers(-1000, 1000, items).astype(np.int32)
        tensors = (image(x), image(np.zeros(items, np.int32)))
        yield Probe(f"scalar.{name}", "probe_scalar", tensors, 1, (number, rows), view="int32_t")


# ---------------------------------------------------------------------------------------- memory vectors


def _vectors() -> Iterator[Probe]:
    for op in VECTOR:
        for dtype in _TYPES[op]:
            yield _vector(op, dtype)
    for op in ("Add", "Max", "Min", "Mul", "Exp", "Ln", "Sqrt", "Div"):
        special = np.array(_SPECIAL * 16, np.float32)
        other = np.repeat(np.array(_SPECIAL, np.float32), 16)
        yield _vector(op, "float", "special", x0=special, x1=other)
    yield _vector("Add", "float", "lanes", lanes=37, repeats=3)
    yield _vector("Muls", "half", "mask", mask=(0x0123456789ABCDEF, 0xF0F0F0F00F0F0F0F), repeats=1)
    yield _vector("Add", "float", "strides", lanes=64, repeats=2, strides=(1, 1, 1, 8, 0, 8))


def _vector(op: str, dtype: str, variant: str = "", **call: Any) -> Probe:
    name = ".".join(filter(None, ("vector", op, dtype, variant)))
    x0 = call.get("x0", _values(name, dtype))
    x1 = call.get("x1", _values(name + "b", dtype))
    if op in ("Ln", "Sqrt", "Rsqrt", "Reciprocal") and not variant:
        x0 = np.abs(x0.astype(np.float32)).astype(x0.dtype) + x0.dtype.type(0.01)
    if op == "Div" and not variant:
        x1 = np.where(np.abs(x1.astype(np.float32)) < 0.01, 1, x1.astype(np.float32)).astype(x1.dtype)
    y = _values(name + "y", dtype)
    sliced = "lanes" in call or "mask" in call
    words = [int(np.uint64(word).view(np.int64)) for word in call.get("mask", (0, 0))]
    head = (VECTOR.index(op), TYPES[dtype][0], -1 if sliced else len(x0), call.get("lanes", -1))
    scalar = {"ShiftLeft": 3.0, "ShiftRight": 3.0}.get(op, 2.5 if dtype in ("float", "half", "bfloat16_t") else 3.0)
    integers = (*head, *words, call.get("repeats", 1), *call.get("strides", CONTIGUOUS))
    units = UNITS.get(op, 0) if dtype in ("float", "half") else 0
    defines = (f"PROBE_ONE=k{op}", f"PROBE_TYPE={dtype}")
    return Probe(name, "probe_vector", (image(x0), image(x1), image(y)), 2, integers, (scalar,), dtype, units, defines)


# ---------------------------------------------------------------------------------------- casts, reductions, choices


_CASTS = [
    ("float", "bfloat16_t", "RINT"), ("float", "half", "RINT"), ("float", "half", "ODD"), ("float", "fp8_e4m3fn_t", "RINT"),
    ("float", "fp8_e5m2_t", "RINT"), ("float", "int32_t", "RINT"), ("float", "int32_t", "FLOOR"), ("float", "int32_t", "CEIL"),
    ("float", "int32_t", "ROUND"), ("float", "int32_t", "TRUNC"), ("bfloat16_t", "float", "NONE"), ("half", "float", "NONE"),
    ("fp8_e4m3fn_t", "float", "NONE"), ("fp8_e5m2_t", "float", "NONE"), ("int32_t", "float", "RINT"),
    ("half", "int8_t", "RINT"), ("uint8_t", "half", "NONE"), ("fp4x2_e2m1_t", "bfloat16_t", "NONE"),
]  # fmt: skip


def _others() -> Iterator[Probe]:
    for source, to, mode in _CASTS:
        yield _cast(source, to, mode)
    x = np.round(_values("reduce", "float", 768) * 4)
    nan = x.copy()
    nan[::97] = np.nan
    repeats = {"lanes": 64, "repeats": 3, "strides": (1, 1, 1, 1, 8, 8)}
    sums, pairs, scratch = np.zeros(8, np.float32), np.zeros(8, np.float32), np.zeros(768, np.float32)
    yield _other("ReduceSum", "float", "", x, scratch, sums, count=768)
    yield _other("ReduceSum", "float", "order", _values("order", "float", 768), scratch, sums, count=768, units=None)
    for op in ("ReduceMax", "ReduceMin"):
        yield _other(op, "float", "", x, scratch, pairs, mode=1, count=700)
        yield _other(op, "float", "nan", nan, scratch, pairs, mode=1, count=700)
    for op in ("RepeatSum", "RepeatMax", "RepeatMin", "BlockSum", "BlockMax", "BlockMin"):
        yield _other(op, "float", "", x, EMPTY, np.zeros(64, np.float32), **repeats)
    yield _other("Brcb", "float", "", x[:16], EMPTY, np.zeros(128, np.float32), repeats=2)
    a, b = np.round(_values("compare", "float", 256)), np.round(_values("comparewith", "float", 256))
    b[::31] = np.nan
    for mode in range(6):
        yield _other("Compare", "float", str(mode), a, b, np.zeros(32, np.uint8), mode=mode, count=256)
        yield _other("Compares", "float", str(mode), b, EMPTY, np.zeros(32, np.uint8), mode=mode, count=256, scalar=1.0)
    for mode in (0, 1, 2):
        behind = np.zeros(32768 + 64, np.uint8)
        behind[: 4 * 256] = image(a)
        behind[32768:] = _rng("select").integers(0, 256, 64)
        yield _other("Select", "float", str(mode), behind, b, np.zeros(256, np.float32), mode=mode, count=256, scalar=-1.5)
    offsets = (4 * _rng("gather").permutation(256)[:128]).astype(np.uint32)
    yield _other("Gather", "float", "", a, offsets, np.zeros(128, np.float32), count=128)
    yield _other("GatherMask", "int32_t", "", np.arange(256, dtype=np.int32), EMPTY, np.zeros(128, np.int32), mode=2, repeats=4)
    yield _other("Index", "float", "", np.zeros(2, np.float32), EMPTY, np.zeros(99, np.float32), count=99, scalar=5.0)
    c, d = _values("mix", "bfloat16_t", 64), _values("mixwith", "bfloat16_t", 64)
    for op in ("Interleave", "DeInterleave"):
        yield _other(op, "bfloat16_t", "", c, d, np.zeros(128, ml_dtypes.bfloat16), count=64)


def _cast(source: str, to: str, mode: str) -> Probe:
    name, count = f"Cast.{source}.{to}.{mode}", 256
    if source == "fp4x2_e2m1_t" or source.startswith("fp8"):
        x = np.arange(256, dtype=np.uint8)
        count = 512 if source == "fp4x2_e2m1_t" else 256
        kept = np.isfinite(x.view(TYPES[source][1]).astype(np.float32)) if source.startswith("fp8") else np.ones(256, bool)
        x = np.where(kept, x, 0).astype(np.uint8)
    elif source in ("float", "half", "bfloat16_t"):
        x = (_values(name, source, count).astype(np.float32) * 40).astype(TYPES[source][1])
        x[:6] = np.array([0.5, 1.5, -0.5, -2.5, 448, 465], np.float32).astype(x.dtype)
    else:
        x = _values(name, source, count)
    y = np.zeros(count, np.uint8 if to == "fp4x2_e2m1_t" else TYPES[to][1])
    defines = ("PROBE_ONE=kCast", f"PROBE_TYPE={to}", f"PROBE_FROM={source}")
    integers = (OTHER.index("Cast"), TYPES[to][0], TYPES[source][0], ROUND[mode], count, 0, 1, *CONTIGUOUS)
    return Probe(f"other.{name}", "probe_other", (image(x), EMPTY, image(y)), 2, integers, (0.0,), to, 0, defines)


def _other(op: str, dtype: str, variant: str, x0: np.ndarray, x1: np.ndarray, y: np.ndarray, **call: Any) -> Probe:
    name = ".".join(filter(None, ("other", op, dtype, variant)))
    number, options = TYPES[dtype][0], (call.get("mode", 0), call.get("count", -1), call.get("lanes", 0), call.get("repeats", 1))
    integers = (OTHER.index(op), number, number, *options, *call.get("strides", CONTIGUOUS))
    defines, tensors = (f"PROBE_ONE=k{op}", f"PROBE_TYPE={dtype}"), (image(x0), image(x1), image(y))
    view = "uint8_t" if y.dtype == np.uint8 else dtype
    return Probe(name, "probe_other", tensors, 2, integers, (call.get("scalar", 0.0),), view, call.get("units", 0), defines)


# ---------------------------------------------------------------------------------------- register functions


_REGISTERS = {
    **{f"LoadAlign.{number}": (number, "uint8_t", 0) for number in range(15)},
    **{f"StoreAlign.{number}": (number, "uint8_t", 37) for number in range(20, 26)},
    **{f"pairs.{number}": (number, "uint8_t", 0) for number in (30, 31, 32)},
    "arithmetic.float": (40, "float", 33), "arithmetic.uint16_t": (41, "uint16_t", 33), "arithmetic.half": (42, "half", 33),
    "precision": (43, "float", 64),
    **{f"Cast.{number}": (number, "uint8_t", 50) for number in range(50, 56)},
    "Reduce.sum": (60, "float", 64), "Reduce.max": (61, "float", 9), "Reduce.min": (62, "float", 9),
    **{f"Interleave.{number}": (number, "uint8_t", 0) for number in (70, 71, 72)},
    "choose": (80, "float", 0), "unaligned": (81, "float", 13), "barrier": (90, "float", 4),
}  # fmt: skip


def _registers() -> Iterator[Probe]:
    for name, (number, view, count) in _REGISTERS.items():
        a, b = _values(name, "float", 512), np.abs(_values(name + "b", "float", 128)) + np.float32(0.5)
        if number in (1, 4, 6, 8, 11, 21) or number in (41, 42):
            small = _rng(name).integers(0, 15, 512)
            a, b = (small.astype(TYPES[view][1] if number in (41, 42) else np.uint8) for _ in range(2))
        if number == 80:
            b = np.concatenate([b[:64], _rng("index").integers(0, 64, 64).astype(np.uint32).view(np.float32)])
        if number in (40, 60):
            a, b = np.round(a * 4), np.round(b * 4)
        y = np.zeros(1024, np.float32) if number in (40, 42, 43) else np.full(4096, 0x5A, np.uint8)
        units = 2 if number == 43 else 0
        yield Probe(f"reg.{name}", "probe_reg", (image(a), image(b), image(y)), 2, (number, count), (), view, units)


_MATH = "Sub Mul Min And Or Xor Ln Abs Relu Neg Not Maxs Mins ShiftLefts ShiftRights LeakyRelu Axpy".split()
_BITS = ("And", "Or", "Xor", "Not", "ShiftLefts", "ShiftRights")


def _maths() -> Iterator[Probe]:
    for number, op in enumerate(_MATH):
        dtype = "uint16_t" if op in _BITS else "float"
        items = 128 if op in _BITS else 64
        x0, x1, y = (_values(f"math.{op}{part}", dtype, items) for part in "aby")
        x0 = np.abs(x0) + np.float32(0.01) if op == "Ln" else x0
        tensors, defines = tuple(image(t) for t in (x0, x1, y)), (f"PROBE_ONE=k{op}",)
        yield Probe(f"math.{op}", "probe_math", tensors, 2, (number, items - 5), (), dtype, UNITS.get(op, 0), defines)


# ---------------------------------------------------------------------------------------- the cube


_CUBE_TYPES = {
    "float": "float, float, float, false", "half": "half, half, float, false",
    "bf16": "bfloat16_t, bfloat16_t, float, false", "bf16_out": "bfloat16_t, bfloat16_t, bfloat16_t, false",
    "e4m3": "fp8_e4m3fn_t, fp8_e4m3fn_t, float, false", "mx_e4m3": "fp8_e4m3fn_t, mx_fp8_e4m3_t, float, true",
    "mx_e2m1": "fp4x2_e2m1_t, fp4x2_e2m1_t, float, true",
}  # fmt: skip
_STORED = {"float": np.float32, "half": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "mx_e4m3": ml_dtypes.float8_e4m3fn}


def _products() -> Iterator[Probe]:
    for kind in _CUBE_TYPES:
        yield _product(kind, "", 32, 48, 128)
    yield _product("bf16", "ragged", 13, 7, 64)
    yield _product("bf16", "gemv", 1, 32, 64)
    yield _product("bf16", "steps", 32, 32, 256, steps=4)
    for kind in ("float", "bf16", "e4m3"):
        yield _product(kind, "a_transposed", 32, 64, 64, a_transposed=1)
        yield _product(kind, "b_transposed", 32, 64, 64, b_transposed=1)
    for kind in ("e4m3", "mx_e4m3"):
        yield _product(kind, "subnormal", 32, 48, 128, codes=8)
    yield _product("mix", "", 32, 64, 64)
    yield _product("bf16", "order", 32, 32, 128, whole=False)
    yield _product("mx_e4m3", "order", 32, 32, 128, whole=False)


def _product(kind: str, variant: str, m: int, n: int, k: int, whole: bool = True, **call: int) -> Probe:
    name = ".".join(filter(None, ("cube", kind, variant)))
    rng, dtype = _rng(name), _STORED.get(kind, ml_dtypes.bfloat16)
    if kind == "mx_e2m1":
        a, b = (rng.integers(0, 256, (rows, k // 2)).astype(np.uint8) for rows in (m, n))
    elif "codes" in call:  # the smallest codes of the type, which are its subnormal values
        a, b = (rng.integers(0, call["codes"], (rows, k)).astype(np.uint8) for rows in (m, n))
    else:
        draw = (lambda s: rng.integers(-4, 5, s)) if whole else rng.standard_normal
        a, b = (draw((rows, k)).astype(np.float32).astype(dtype) for rows in (m, n))
    scales = [rng.integers(126, 129, (rows, k // 32)).astype(np.uint8) if kind.startswith("mx") else EMPTY for rows in (m, n)]
    a, b = a.T if call.get("a_transposed") else a, b.T if call.get("b_transposed") else b
    c = np.zeros((m, n), ml_dtypes.bfloat16 if kind == "bf16_out" else np.float32)
    transposed, steps = (call.get("a_transposed", 0), call.get("b_transposed", 0)), call.get("steps", 1)
    defines = ("PROBE_MIX=mix",) if kind == "mix" else (f"PROBE_CUBE={_CUBE_TYPES[kind]}",)
    tensors = tuple(image(t) for t in (a, b, c, *scales))
    view, units = "bfloat16_t" if kind == "bf16_out" else "float", 0 if whole else None
    return Probe(name, "probe_cube", tensors, 2, (CUBE[kind], m, n, k, *transposed, steps, 1), (), view, units, defines)
