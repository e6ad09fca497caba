"""The provider: every kernel of this package for a target, or the reason why there is none.

A backend calls `triton_kernels(target)` in its own `kernels` slot. Whether Triton interprets (TRITON_INTERPRET=1, for
tests on a CPU) or compiles was decided when Triton was imported.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.kernel import Kernel

from deepinfer_triton.targets import Target


@functools.cache
def unavailable_reason() -> str | None:
    """Why there are no Triton kernels, or None if there are."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if not hasattr(triton.language, "join"):
        return f"triton {triton.__version__} is too old; the kernels need 3.2 or later"
    return None


def triton_kernels(target: Target) -> list[Kernel]:
    """The kernels for `target`, by op name. Raises BackendUnavailable with the reason when Triton is not there."""
    if reason := unavailable_reason():
        raise BackendUnavailable(reason)
    from deepinfer_triton import ops

    names = sorted(module.name for module in pkgutil.iter_modules(ops.__path__))
    makers = [make for name in names for make in importlib.import_module(f"{ops.__name__}.{name}").MAKERS]
    return [kernel for make in makers if (kernel := make(target)) is not None]
