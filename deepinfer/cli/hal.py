"""`deepinfer hal list`: backends, their devices and kernels, what is not built and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

from deepinfer.cli.options import Json
from deepinfer.cli.terminal import print_json, print_rich, table
from deepinfer.units import format_bytes


def hal_list(as_json: Json = False) -> int:
    """Backends and devices here, kernels by provider, ops that only the references serve, what is not built and why."""
    described = describe_backends()
    if as_json:
        print_json(described)
    else:
        for backend in described["backends"]:
            _print_backend(backend, described["ops"])
    return 0


def describe_backends() -> dict[str, Any]:
    """HAL version, number of op cards, and one entry per installed backend; nothing is loaded but the backends."""
    from deepinfer_hal import HAL_VERSION
    from deepinfer_hal.card import all_cards
    from deepinfer_hal.registry import list_backends

    ops = sorted(all_cards())
    backends = [_describe(found, ops) for found in list_backends()]
    return {"hal_version": ".".join(map(str, HAL_VERSION)), "ops": len(ops), "backends": backends}


def _describe(found: Any, ops: list[str]) -> dict[str, Any]:
    if found.backend is None:
        return {"name": found.name, "error": " ".join(found.error.split()), "devices": [], "build": {}}
    return {
        "name": found.name,
        "error": None if found.devices else "no device",
        "devices": [_describe_device(found.backend, device, ops) for device in found.devices],
        "build": dict(found.backend.describe_build()),
    }


def _describe_device(backend: Any, device: Any, ops: list[str]) -> dict[str, Any]:
    kernels = backend.kernels(device.index)
    served = {kernel.op for kernel in kernels}
    capabilities = backend.capabilities(device.index)
    return {
        "index": device.index,
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in capabilities.stream_dtypes],
        "graphs": capabilities.graphs,
        "kernels": dict(Counter(kernel.provider for kernel in kernels)),
        "kernel_ops": sorted(served),
        "batch_invariant_ops": sorted({kernel.op for kernel in kernels if kernel.invariant == "yes"}),
        "reference_only_ops": [op for op in ops if op not in served],
    }


def device_lines() -> list[str]:
    """One sentence per backend, for help texts."""
    described = describe_backends()
    lines = []
    for backend in described["backends"]:
        if not backend["devices"]:
            lines.append(f"{backend['name']}: {backend['error']}.")
        for device in backend["devices"]:
            native = len(device["kernel_ops"])
            lines.append(
                f"{backend['name']}:{device['index']}: {device['name']}, {format_bytes(device['memory_bytes'])}, "
                f"{' and '.join(device['dtypes'])}, kernels for {native} of {described['ops']} ops, references for the rest."
            )
    return lines


def _print_backend(backend: dict[str, Any], ops: int) -> None:
    rows = table(backend["name"], "")
    if backend["error"]:
        rows.add_row("  not usable", backend["error"])
    for device in backend["devices"]:
        rows.add_row(f"  device {device['index']}", f"{device['name']}, {format_bytes(device['memory_bytes'])}")
        rows.add_row("  dtypes", ", ".join(device["dtypes"]))
        providers = ", ".join(f"{count} by {provider}" for provider, count in device["kernels"].items()) or "none"
        rows.add_row("  kernels", f"{providers}; {len(device['kernel_ops'])} of {ops} ops, the references serve all")
        if device["kernel_ops"]:
            invariant = len(device["batch_invariant_ops"])
            rows.add_row("  with kernels", f"{', '.join(device['kernel_ops'])} ({invariant} batch-invariant)")
        rows.add_row("  references only", ", ".join(device["reference_only_ops"]) or "none")
    for part, state in backend["build"].items():
        rows.add_row(f"  {part}", state)
    print_rich(rows)
