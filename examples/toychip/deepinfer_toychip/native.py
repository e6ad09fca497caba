"""The port's compiled kernels, and what they serve."""

import ctypes
import functools
from pathlib import Path

import toychip
from deepinfer_hal.c_abi import CLibrary
from deepinfer_hal.kernel import No, Yes

# [supports]
DTYPES = ("bf16", "f32", "u8", "i32", None)


def supports(call):
    """The kernels read and write these dtypes; a model in any other is refused with a reason, never served wrongly."""
    for name in ("x", "q", "out"):
        if call.statics.get(name) not in DTYPES:
            return No(f"{name} is {call.statics[name]}; the kernels know {', '.join(filter(None, DTYPES))}")
    return Yes()


# [/supports]


@functools.cache
def library() -> CLibrary:
    """The kernel library; device pointers go to it as they are."""
    return CLibrary(Path(__file__).with_name("libdeepinfer_toychip.so"))


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the chip."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ctypes.CDLL(str(toychip.RUNTIME)).toychip_memory_info(ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value
