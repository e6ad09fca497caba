"""linear and grouped_linear in CUDA C++, without a GPU: which calls they are offered, which they refuse before any launch,
and that their kernels compile without a spill."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepinfer_cuda import native
from deepinfer_hal.c_abi import CLibrary, include_dir, pack_tensor, pack_weight
from deepinfer_hal.card import all_cards
from deepinfer_hal.errors import BadCall, Unsupported
from deepinfer_hal.kernel import CallSpec, No, Yes
from deepinfer_hal.statics import call_spec
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
OPS = ("linear", "grouped_linear")
SERVED = {"linear": 11, "grouped_linear": 6}
"""Cases of each card that the kernels serve."""


def answers(op):
    card = all_cards()[op]
    for case in card.enumerate_cases():
        args = card.generate(case, 3, "cpu", lambda role, stored: WeightHandle(role, stored))
        yield case.params, native.supports(call_spec(card, args))


@pytest.mark.parametrize("op", OPS)
def test_the_kernels_are_offered_codes_times_fp8_weights_and_bf16_times_bf16_and_no_other_case(op):
    yes = [params for params, answer in answers(op) if isinstance(answer, Yes)]
    assert len(yes) == SERVED[op]
    for params in yes:
        assert (params["x"], params["w"]) in (("u8", "fp8_block32"), ("bf16", "bf16"))
        assert params["out"] != "u8" or params["N"] % 32 == 0
    refused = [answer.reason for params, answer in answers(op) if isinstance(answer, No)]
    assert refused and all("the kernel knows" in reason for reason in refused)


def test_what_the_statics_leave_open_is_refused_so_that_the_call_decides():
    for statics in ({}, {"x": "u8", "out": "bf16"}, {"x": "u8", "weight": "fp8_block32", "out": "u8"}):
        assert isinstance(native.supports(CallSpec("linear", statics)), No)
    assert isinstance(native.supports(CallSpec("linear", {"x": "u8", "weight": "fp8_block32", "out": "bf16"})), Yes)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernels of linear alone, compiled as the build does it: a spill is an error."""
    if NVCC is None:
        pytest.skip("nvcc is not on the PATH; it comes with the CUDA toolkit")
    made = tmp_path_factory.mktemp("linear") / "linear.o"
    flags = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3", "-Xptxas=-v", "-Xcompiler", "-fPIC"]
    include = [f"-I{ROOT / 'kernels_cuda'}", f"-I{include_dir()}"]
    command = [sys.executable, ROOT / "tools/cuda/checked_nvcc.py", NVCC, *flags, *include, "-c", ROOT / "kernels_cuda/linear.cu"]
    environment = {**os.environ, "DEEPINFER_CACHE": str(made.parent / "cache")}
    subprocess.run([*map(str, command), "-o", str(made)], env=environment, check=True, capture_output=True)
    subprocess.run([NVCC, "-shared", "-cudart", "static", str(made), "-o", str(made.with_suffix(".so"))], check=True)
    return CLibrary(made.with_suffix(".so"))


def arguments(k=64, n=64, x=torch.uint8, out=torch.bfloat16):
    """The arguments of a call of linear on host memory, which no refusal touches."""
    codes = torch.zeros(2, k, dtype=x)
    handle = WeightHandle(
        "w",
        CanonicalWeight(
            "fp8_block32", torch.zeros(n, k, dtype=torch.uint8), torch.zeros(-(-n // 32), -(-k // 32), dtype=torch.uint8)
        ),
    )
    coded = out == torch.uint8
    scales = torch.zeros(2, n // 32, dtype=torch.uint8) if coded else None
    return codes, torch.zeros(2, k // 32, dtype=torch.uint8), handle, None, torch.zeros(2, n, dtype=out), scales


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(x=torch.bfloat16), Unsupported, "takes fp8_32 codes and FP8 weights of 32 x 32 blocks, or BF16 for both"),
        (dict(k=48), Unsupported, "K in multiples of 32, got 48"),
        (dict(out=torch.int32), Unsupported, "writes bf16, f32 or fp8_32"),
        (dict(n=48, out=torch.uint8), BadCall, "N in multiples of 32 and out_scale"),
    ],
)
def test_a_call_that_the_kernel_cannot_serve_is_refused_in_a_sentence_before_any_launch(library, changes, error, words):
    with pytest.raises(error, match=words):
        library.bind(all_cards()["linear"])(*arguments(**changes))


WRONG = [
    pytest.param(0, torch.zeros(2, 96, dtype=torch.uint8), BadCall, r"x \[2, 64\] and out \[2, 64\].*got \[2, 96\]", id="x"),
    pytest.param(1, torch.zeros(2, 1, dtype=torch.uint8), BadCall, r"x_scale u8 \[2, 2\]", id="x_scale"),
    pytest.param(1, torch.zeros(2, 2), BadCall, r"x_scale u8 \[2, 2\]", id="x_scale of float32"),
    pytest.param(3, torch.zeros(1, dtype=torch.int64), BadCall, "count as i32", id="count"),
    pytest.param(4, torch.zeros(2, 32, dtype=torch.bfloat16), BadCall, r"out \[2, 64\].*and \[2, 32\]", id="out"),
    pytest.param(4, torch.zeros(3, 64, dtype=torch.bfloat16), BadCall, r"out \[2, 64\].*and \[3, 64\]", id="rows of out"),
    pytest.param(4, torch.zeros(64, 2, dtype=torch.bfloat16).T, BadCall, "rows without gaps", id="out by columns"),
]


@pytest.mark.parametrize(("place", "wrong", "error", "words"), WRONG)
def test_operands_that_do_not_fit_each_other_are_refused_before_any_launch(library, place, wrong, error, words):
    given = list(arguments())
    given[place] = wrong
    with pytest.raises(error, match=words):
        library.bind(all_cards()["linear"])(*given)


def test_a_weight_with_gaps_is_refused(library):
    given = list(arguments())
    gaps = torch.zeros(64, 96, dtype=torch.uint8)[:, :64]
    given[2] = WeightHandle("w", CanonicalWeight("fp8_block32", gaps, torch.zeros(2, 2, dtype=torch.uint8)))
    with pytest.raises(Unsupported, match="a weight and its scales without gaps"):
        library.bind(all_cards()["linear"])(*given)


def test_more_rows_than_an_int_counts_are_refused(library):
    rows = 2**31
    x, scale, handle, _, out, _ = arguments()
    shapes = (rows, 64), (rows, 2), (rows, 64)
    x, scale, out = (pack_tensor(one, shape=shape) for one, shape in zip((x, scale, out), shapes, strict=True))
    tensors = [x, scale, *pack_weight(handle), pack_tensor(None), out, pack_tensor(None)]
    with pytest.raises(Unsupported, match=r"at most 2\^31 - 1 rows, columns and features, got 2147483648, 64 and 64"):
        library.function("linear")(tensors, [], [])


def test_an_empty_call_does_nothing_and_asks_no_gpu(library):
    x, scale, handle, count, out, _ = arguments()
    library.bind(all_cards()["linear"])(x[:0], scale[:0], handle, count, out[:0], None)
