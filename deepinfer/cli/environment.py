"""`deepinfer collect-env`: versions and devices for a bug report. Works when half of what is needed is missing or broken."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "msgspec", "typer", "rich")
OPTIONAL = ("triton", "torch-npu", "matplotlib", "pytest", "hypothesis", "ml-dtypes")


def _json_option() -> Any:
    try:
        from deepinfer.cli.options import Json
    except ImportError:  # the options need a package that is missing; then no option is declared either
        return Annotated[bool, None]
    return Json


def collect_env(as_json: _json_option() = False) -> int:
    """Versions of everything that matters, devices, and what is missing; for bug reports."""
    return _print(gather(), as_json)


def collect_env_without_packages(as_json: bool) -> int:
    """The same where even the packages of the command line are missing."""
    return _print(gather(), as_json)


def gather() -> dict[str, Any]:
    """Sections of name -> text. A part that fails says so in its place."""
    return {
        "deepinfer": _attempt(_deepinfer_version),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "processor": _attempt(_processor),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in REQUIRED},
        "optional_packages": {name: _version(name) for name in OPTIONAL},
        "torch": _attempt(_torch_facts),
        "packaged_models": _attempt(_packaged_models),
        "hal": _attempt(_hal_facts),
        "environment": {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ},
    }


def _attempt(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:
        return f"not available: {type(error).__name__}: {' '.join(str(error).split())}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _deepinfer_version() -> str:
    import deepinfer

    return f"{deepinfer.__version__} ({os.path.dirname(deepinfer.__file__)})"


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _torch_facts() -> dict[str, Any]:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "accelerator": "none" if accelerator is None else str(accelerator),
    }


def _packaged_models() -> list[str]:
    from deepinfer.model_path import packaged_models

    return packaged_models()


def _hal_facts() -> dict[str, Any]:
    from deepinfer.cli.hal import describe_backends

    return describe_backends()


def _print(facts: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    hal = facts["hal"]
    for name, value in facts.items():
        if name == "hal" and isinstance(hal, dict):
            _print_hal(hal)
        elif isinstance(value, dict):
            for key, item in value.items():
                print(f"{name}.{key}: {item}")
        else:
            print(f"{name}: {', '.join(value) if isinstance(value, list) else value}")
    return 0


def _print_hal(hal: dict[str, Any]) -> None:
    print(f"hal.version: {hal['hal_version']}, {hal['ops']} ops")
    for backend in hal["backends"]:
        print(f"hal.{backend['name']}: {backend['error'] or 'usable'}")
        for device in backend["devices"]:
            print(f"hal.{backend['name']}:{device['index']}: {device['name']}, kernels for {len(device['kernel_ops'])} ops")
        for part, state in backend["build"].items():
            print(f"hal.{backend['name']}.{part}: {state}")
