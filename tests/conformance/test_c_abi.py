"""The native kernels through their plain C ABI: no Python object crosses it, and a bad call is an error in a struct."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from deepinfer_cpu.kernels import native, native_unavailable_reason
from deepinfer_hal.card import all_cards, get_card

INCLUDE = Path(__file__).parents[2] / "hal" / "include"
DI_NONE, DI_F32, DI_BF16, DI_U8, DI_I32 = 0, 1, 2, 3, 4
DI_OK, DI_BAD_CALL = 0, 1
DTYPES = {torch.float32: DI_F32, torch.bfloat16: DI_BF16, torch.uint8: DI_U8, torch.int32: DI_I32}


class Tensor(ctypes.Structure):
    """di_tensor"""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("layout", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
    ]


class Params(ctypes.Structure):
    """di_params"""

    _fields_ = [
        ("i", ctypes.POINTER(ctypes.c_int64)),
        ("d", ctypes.POINTER(ctypes.c_double)),
        ("n_i", ctypes.c_int32),
        ("n_d", ctypes.c_int32),
    ]


class Error(ctypes.Structure):
    """di_error"""

    _fields_ = [("message", ctypes.c_char * 256)]


def compiler(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no compiler: none of {', '.join(names)} is on the path")
    return found


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The built extension as a plain shared library."""
    module = native()
    if module is None:
        pytest.skip(f"no native kernels: {native_unavailable_reason()}")
    return ctypes.CDLL(module.__file__)


def describe(value: torch.Tensor | None) -> Tensor:
    if value is None:
        return Tensor(dtype=DI_NONE)
    five = ctypes.c_int64 * 5
    data = value.data_ptr() if value.numel() else None
    return Tensor(data, DTYPES[value.dtype], 0, -1, value.dim(), five(*value.shape), five(*value.stride()))


def call(library, symbol: str, tensors: list, ints: tuple = (), reals: tuple = ()) -> tuple[int, str]:
    """(status, message) of one call."""
    kernel = library[symbol]
    kernel.restype = ctypes.c_int
    held = (Tensor * max(len(tensors), 1))(*[describe(one) for one in tensors])
    integers = (ctypes.c_int64 * max(len(ints), 1))(*ints)
    doubles = (ctypes.c_double * max(len(reals), 1))(*reals)
    params = Params(integers, doubles, len(ints), len(reals))
    error = Error()
    status = kernel(held, len(tensors), ctypes.byref(params), None, None, ctypes.c_size_t(0), ctypes.byref(error))
    return status, error.message.decode()


def norm_tensors(rows: int = 5, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> list:
    """x, weight, count, out, out_codes, out_scales of rms_norm."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=g).to(dtype)
    weight = (1 + 0.1 * torch.randn(width, generator=g)).to(dtype)
    out = torch.full_like(x, float("nan"))
    return [x, weight, None, out, torch.zeros(rows, width, dtype=torch.uint8), torch.zeros(rows, width // 32, dtype=torch.uint8)]


@pytest.mark.parametrize("names, flags", [
    (("gcc", "clang", "cc"), ["-x", "c", "-std=c99", "-pedantic-errors"]),
    (("gcc", "clang", "cc"), ["-x", "c", "-std=c11", "-pedantic-errors"]),
    (("g++", "clang++", "c++"), ["-x", "c++", "-std=c++17", "-pedantic-errors"]),
], ids=["C99", "C11", "C++17"])  # fmt: skip
def test_the_header_compiles_alone_without_a_warning(names, flags):
    source = '#include "deepinfer/hal.h"\n#include "deepinfer/hal.h"\nint uses(di_kernel k) { return k != 0; }\n'
    command = [compiler(*names), *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", str(INCLUDE), "-"]
    done = subprocess.run(command, input=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_structs_have_the_same_layout_in_c(tmp_path):
    parts = {"di_tensor": Tensor, "di_params": Params, "di_error": Error}
    fields = [(name, field) for name, struct in parts.items() for field, _ in struct._fields_]
    prints = [f'printf("%zu\\n", sizeof({name}));' for name in parts]
    prints += [f'printf("%zu\\n", offsetof({name}, {field}));' for name, field in fields]
    prints += ['printf("%d\\n", DI_NONE); printf("%d\\n", DI_BF16); printf("%d\\n", DI_I32); printf("%d\\n", DI_BAD_CALL);']
    source = tmp_path / "layout.c"
    source.write_text('#include <stdio.h>\n#include "deepinfer/hal.h"\nint main(void) { ' + "\n".join(prints) + " return 0; }\n")
    program = tmp_path / "layout"
    subprocess.run([compiler("gcc", "clang", "cc"), "-std=c99", "-I", str(INCLUDE), str(source), "-o", str(program)], check=True)
    found = [int(line) for line in subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()]
    wanted = [ctypes.sizeof(struct) for struct in parts.values()]
    wanted += [getattr(parts[name], field).offset for name, field in fields]
    assert found == [*wanted, DI_NONE, DI_BF16, DI_I32, DI_BAD_CALL]


def test_the_headers_version_is_the_hals():
    from deepinfer_hal import HAL_VERSION

    assert f"#define DI_HAL_VERSION {HAL_VERSION[0]}\n" in (INCLUDE / "deepinfer" / "hal.h").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_called_from_plain_structs_gives_what_its_card_says(library, dtype):
    tensors = norm_tensors(dtype=dtype)
    assert call(library, "di_rms_norm", tensors, reals=(1e-6,)) == (DI_OK, "")
    x, weight, _, out, codes, scales = tensors
    expected = [torch.zeros_like(out), torch.zeros_like(codes), torch.zeros_like(scales)]
    get_card("rms_norm").reference(x, weight, 1e-6, None, *expected)
    assert torch.allclose(out.float(), expected[0].float(), rtol=2**-7, atol=1e-6)
    assert (codes == expected[1]).float().mean() >= 0.99 and torch.equal(scales, expected[2])


def test_a_weight_is_two_tensors_of_which_the_second_may_be_absent(library):
    """A dense matrix in its own layout, gathered from by embedding_gather."""
    values = torch.randn(7, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, out = torch.tensor([6, -1, 0], dtype=torch.int32), torch.full((3, 2, 32), float("nan"), dtype=torch.bfloat16)
    assert call(library, "di_embedding_gather", [ids, values, None, None, out]) == (DI_OK, "")
    expected = torch.stack([values[6], torch.zeros_like(values[0]), values[0]])
    assert torch.equal(out[:, 0], expected) and torch.equal(out[:, 1], expected)


def test_no_rows_and_no_memory_is_a_call_that_does_nothing(library):
    tensors = norm_tensors(rows=0)
    assert all(describe(one).data is None for one in (tensors[0], tensors[3]))
    assert call(library, "di_rms_norm", tensors, reals=(1e-6,)) == (DI_OK, "")


def test_a_device_count_keeps_later_rows_untouched(library):
    tensors = norm_tensors()
    tensors[2] = torch.tensor([2], dtype=torch.int32)
    assert call(library, "di_rms_norm", tensors, reals=(1e-6,)) == (DI_OK, "")
    assert tensors[3][:2].isfinite().all() and tensors[3][2:].isnan().all()


BAD_NORMS = {
    "a weight of another width": lambda t: [t[0], t[1][:32].clone(), *t[2:]],
    "integer rows": lambda t: [t[0].view(torch.uint8), *t[1:]],
    "rows of one dim": lambda t: [t[0][0], *t[1:]],
    "columns apart": lambda t: [torch.zeros(64, 5, dtype=torch.bfloat16).T, *t[1:]],
    "too short an output": lambda t: [*t[:3], t[3][:4], *t[4:]],
    "codes without scales": lambda t: [*t[:5], None],
    "a float count": lambda t: [*t[:2], torch.ones(1), *t[3:]],
    "a tensor too few": lambda t: t[:5],
    "a tensor too many": lambda t: [*t, None],
}


@pytest.mark.parametrize("spoil", BAD_NORMS.values(), ids=BAD_NORMS)
def test_a_bad_call_fills_the_error_and_writes_nothing(library, spoil):
    tensors = norm_tensors()
    status, message = call(library, "di_rms_norm", spoil(tensors), reals=(1e-6,))
    assert status == DI_BAD_CALL and message.startswith("rms_norm")
    assert tensors[3].isnan().all() and not tensors[4].any() and not tensors[5].any()


def test_every_kernel_is_exported_by_its_ops_name_and_counts_its_arguments(library):
    module = native()
    assert len(set(module.ops())) == len(module.ops()) and set(module.ops()) <= set(all_cards())
    for op in module.ops():
        status, message = call(library, f"di_{op}", [], ints=(0,) * 20, reals=(0.0,) * 20)
        assert status == DI_BAD_CALL and message.startswith(op), op


def test_the_longest_message_fits_the_struct(library):
    for op in native().ops():
        _, message = call(library, f"di_{op}", [], ints=(0,) * 20)
        assert 0 < len(message) < 256
