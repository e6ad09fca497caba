"""Holds the Ascend backend's torch_npu calls against what is registered. Runs inside the torch_npu environment.

Vendor ops: each path runs on meta tensors under a recorder; every npu:: call it made is checked for dtypes and shapes
against its `VendorOp`, and what its meta kernel gave against the promised results. Runtime calls: every slot of the NPU
device runs over a stand-in that notes its calls; each must bind to the signature of the real function, and every name of
torch_npu in the package's sources must have been called. Then mutants of each call (a wrong dtype, a missing argument, a
transposed shape, another name, an unknown keyword) must be noticed. Prints one JSON object.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/ascend", "hal", "backends/ascend")]

import npu_paths  # noqa: E402
import torch  # noqa: E402
import torch_npu  # noqa: E402
from deepinfer_ascend.vendor_ops import VENDOR_OPS, Expected, VendorOp  # noqa: E402
from fake_torch_npu import Call as RuntimeCall  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


@dataclass
class Call:
    """A recorded npu:: call: arguments by name, results in order."""

    op: Any
    arguments: dict[str, Any]
    results: tuple[Any, ...]


class Recorder(TorchDispatchMode):
    """Collects the npu:: calls made inside; they run, on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "npu":
            names = [argument.name for argument in func._schema.arguments]
            arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            results = result if isinstance(result, (tuple, list)) else (result,)
            self.calls.append(Call(func, arguments, tuple(results)))
        return result


def mismatches(what: str, tensor: Any, expected: Expected, sizes: dict[str, int]) -> list[str]:
    """How a tensor differs from what is expected; `sizes` learns the names it meets first."""
    if not isinstance(tensor, torch.Tensor):
        return [f"{what} is {type(tensor).__name__}, must be a tensor"]
    found = []
    if tensor.dtype not in expected.dtypes:
        found.append(f"{what} is {tensor.dtype}, must be {' or '.join(map(str, expected.dtypes))}")
    if tensor.dim() != len(expected.dims):
        return [*found, f"{what} is {list(tensor.shape)}, must be [{', '.join(expected.dims)}]"]
    for size, dim in zip(tensor.shape, expected.dims, strict=True):
        wanted = 1
        for name in re.split(r"\*", dim):
            wanted *= int(name) if name.isdigit() else sizes.setdefault(name, size) if name == dim else sizes[name]
        if size != wanted:
            found.append(f"{what} is {list(tensor.shape)}: {dim} must be {wanted}")
    return found


def objections(vendor: VendorOp, arguments: dict[str, Any], sizes: dict[str, int]) -> list[str]:
    """Everything wrong with a call of `vendor` with these arguments: declaration, schema, meta kernel, results."""
    op = getattr(torch.ops.npu, vendor.name).default
    known = {argument.name: argument for argument in op._schema.arguments}
    found = [f"{name} is no argument of {vendor.name}" for name in arguments if name not in known]
    found += [
        f"{name} is missing" for name, one in known.items() if not one.has_default_value() and name not in arguments
    ]
    sizes = dict(sizes)
    for name, expected in vendor.inputs.items():
        if name in arguments:
            found += mismatches(name, arguments[name], expected, sizes)
        elif not any(f"{name} is missing" == one for one in found):
            found.append(f"{name} is missing")
    if found:
        return found
    try:
        results = op(**arguments)
    except Exception as error:  # noqa: BLE001  (schema and meta kernel raise what they like)
        return [f"the call fails: {str(error).splitlines()[0][:200]}"]
    results = results if isinstance(results, (tuple, list)) else (results,)
    if len(results) != len(vendor.results):
        return [f"{vendor.name} gives {len(results)} results, not {len(vendor.results)}"]
    for index, (result, expected) in enumerate(zip(results, vendor.results, strict=True)):
        found += mismatches(f"result {index}", result, expected, sizes)
    return found


def mutants(vendor: VendorOp, arguments: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(what was broken, arguments) for every declared tensor argument: dtype, absence, and order of dimensions."""
    made = []
    for name, value in arguments.items():
        if name not in vendor.inputs:
            continue
        wrong = torch.float16 if value.dtype != torch.float16 else torch.int8
        made.append((f"{name} as {wrong}", {**arguments, name: value.to(wrong)}))
        made.append((f"without {name}", {key: one for key, one in arguments.items() if key != name}))
        if value.dim() > 1 and len(set(value.shape)) > 1:
            made.append((f"{name} transposed", {**arguments, name: value.transpose(0, value.dim() - 1).contiguous()}))
    return made


SIZES = {"T": 64, "N": 5120, "K": 5120, "H": 5120, "m": 4, "k": 6, "experts": 384}


def card_arguments(card: str) -> tuple[Any, ...]:
    """Meta arguments of the card at V4.1's shapes, in the card's order."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    i32, f32 = torch.int32, torch.float32
    t, h, m, k, experts = (SIZES[name] for name in ("T", "H", "m", "k", "experts"))
    count = meta(1, dtype=i32)
    return {
        "rms_norm": (
            meta(t, h), meta(h), 1e-20, count, meta(t, h), meta(t, h, dtype=torch.uint8), meta(t, h // 32, dtype=torch.uint8),
        ),
        "hyper_connection_post": (meta(t, h), meta(t, m, dtype=f32), meta(t, m, m, dtype=f32), count, meta(t, m, h)),
        "permute": (
            meta(t, h), None, meta(t, k, dtype=i32), experts, None, meta(t * k, h), None, meta(experts + 1, dtype=i32),
            meta(t * k, dtype=i32), meta(t, k, dtype=i32),
        ),
        "unpermute": (meta(t * k, h), meta(t, k, dtype=i32), meta(t, h), count, meta(t, h)),
    }[card]  # fmt: skip


def check_vendor_op(vendor: VendorOp) -> dict[str, Any]:
    """One report row of a vendor op and its mutants."""
    with Recorder() as recorder:
        vendor.call(*card_arguments(vendor.card))
    calls = [call for call in recorder.calls if call.op._schema.name == f"npu::{vendor.name}"]
    others = sorted({call.op._schema.name for call in recorder.calls} - {f"npu::{vendor.name}"})
    row: dict[str, Any] = {"card": vendor.card, "op": vendor.name, "objections": [f"also calls {o}" for o in others]}
    if not calls:
        return {**row, "objections": [f"the path never calls {vendor.name}"]}
    for call in calls:
        row["objections"] += objections(vendor, call.arguments, SIZES)
        broken = mutants(vendor, call.arguments)
        row["mutants"] = len(broken)
        row["mutants_missed"] = [what for what, arguments in broken if not objections(vendor, arguments, SIZES)]
        row["schema"] = str(call.op._schema)
    return row


ATTRIBUTES = {
    "torch_npu.npu.Stream": ("npu_stream",),
    "torch_npu._C._NPUDeviceProperties": ("name", "total_memory", "cube_core_num", "vector_core_num"),
}
"""What the backend reads of objects that calls give."""


def find(path: str) -> Any:
    """What a dotted path names in the real torch_npu; AttributeError if nothing."""
    target: Any = torch_npu
    for name in path.split(".")[1:]:
        target = getattr(target, name)
    return target


def signatures_of(target: Any) -> list[inspect.Signature]:
    """Its signature, or by the docstring the overloads of what pybind made, where their arguments have names; without self."""
    try:
        found = inspect.signature(target)
    except (TypeError, ValueError):
        found = None
    anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if found is not None and {one.kind for one in found.parameters.values()} != anything:
        parameters = list(found.parameters.values())
        return [found.replace(parameters=parameters[1:]) if parameters and parameters[0].name == "self" else found]
    owner = target.__init__ if isinstance(target, type) else target
    text, overloads = getattr(owner, "__doc__", None) or "", []
    for arguments in re.findall(rf"{owner.__name__}\(self: [^,)]+, (.*)\) -> ", text):
        names = re.findall(r"(?:^|, )(\w+): [^=]+?(=.*?)?(?=, \w+: |$)", arguments)
        if names and not any(re.fullmatch(r"arg\d+", name) for name, _ in names):
            kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
            overloads.append(inspect.Signature([inspect.Parameter(n, kind, default=None if d else none) for n, d in names]))
    return overloads


def check_runtime_call(call: RuntimeCall) -> str | None:
    """What is wrong with a runtime call, or None. One whose target has no signature is only looked up."""
    try:
        signatures = signatures_of(find(call.path))
    except AttributeError:
        return f"{call.path} does not exist"
    told = []
    for signature in signatures:
        try:
            signature.bind(*call.args, **call.kwargs)
        except TypeError as error:
            told.append(f"{error}; the signature is {signature}")
        else:
            return None
    return f"{call.path}: {'; '.join(told)}" if told else None


def runtime_mutants(call: RuntimeCall) -> list[tuple[str, RuntimeCall]]:
    """(what was broken, call): another name; where there is a signature, an unknown keyword and a required argument gone."""
    made = [("another name", RuntimeCall(call.path + "s_", call.args, call.kwargs, call.method))]
    signatures = [list(signature.parameters.values()) for signature in signatures_of(find(call.path))]
    if signatures and all(one.kind != inspect.Parameter.VAR_KEYWORD for known in signatures for one in known):
        made.append(("unknown keyword", RuntimeCall(call.path, call.args, {**call.kwargs, "no_such": 1}, call.method)))
    required = [sum(one.default is one.empty and one.kind.name.startswith("POSITIONAL") for one in known) for known in signatures]
    if call.args and required and len(call.args) <= min(required):
        made.append(("without its last argument", RuntimeCall(call.path, call.args[:-1], call.kwargs, call.method)))
    return made


def check_runtime() -> dict[str, Any]:
    """Objections, mutants and what could not be checked of every call that the NPU device's slots made."""
    calls = npu_paths.recorded()
    wrong = {told for call in calls if (told := check_runtime_call(call))}
    missing = npu_paths.named_in_sources() - {call.path for call in calls}
    wrong |= {f"{name} is in the sources, but no path that was run calls it" for name in missing}
    for path, names in ATTRIBUTES.items():
        wrong |= {f"{path} has no {name}" for name in names if not hasattr(find(path), name)}
    good = [call for call in calls if check_runtime_call(call) is None]
    mutants = [(call.path, what, broken) for call in good for what, broken in runtime_mutants(call)]
    return {
        "runtime_calls": sorted({call.path for call in calls}),
        "runtime_without_signature": sorted({call.path for call in good if not signatures_of(find(call.path))}),
        "runtime_objections": sorted(wrong),
        "runtime_mutants": len(mutants),
        "runtime_mutants_missed": sorted({f"{p}: {what}" for p, what, broken in mutants if check_runtime_call(broken) is None}),
    }


def main() -> None:
    rows = [check_vendor_op(vendor) for vendor in VENDOR_OPS]
    report = {"torch": torch.__version__, "torch_npu": torch_npu.__version__, "vendor_ops": rows, **check_runtime()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
