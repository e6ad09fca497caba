"""Who may import whom, and no device names above the HAL line: checked on the syntax tree of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PARTS = {
    "deepinfer": ROOT / "deepinfer",
    "deepinfer_hal": ROOT / "hal" / "deepinfer_hal",
    **{folder.name: folder for folder in sorted(ROOT.glob("backends/*/deepinfer_*")) if folder.is_dir()},
}

OURS = {
    "deepinfer": {"deepinfer", "deepinfer_hal"},
    "deepinfer_hal": {"deepinfer_hal"},
}
"""Parts of this project that a part may import; a backend: itself, the HAL and the portable Triton kernels."""

THIRD_PARTY = {
    "deepinfer": {"torch", "numpy", "safetensors", "tokenizers", "msgspec", "typer", "click", "rich", "matplotlib"},
    "deepinfer_hal": {"torch", "numpy"},
    "deepinfer_cpu": {"torch", "numpy"},
    "deepinfer_triton": {"torch", "numpy", "triton"},
    "deepinfer_cuda": {"torch", "numpy", "triton"},
    "deepinfer_ascend": {"torch", "numpy", "triton", "torch_npu"},
}

LATE = {
    ROOT / "hal" / "deepinfer_hal" / "conformance" / "shapes.py": {"hypothesis"},
    ROOT / "tools" / "nano" / "measure.py": {"rich"},
}
"""Packages that one file imports inside a function, for what not everybody runs: drawing new shapes; a progress bar of
measurements through the installed engine."""

DEVICE_NAMES = {"cpu", "cuda", "npu", "ascend", "mps", "xpu", "hip", "rocm", "hpu", "musa"}
DEVICE_MODULES = {"cuda", "npu", "mps", "xpu"}
DEVICE_FLAGS = {"is_cuda", "is_npu", "is_mps", "is_xpu", "is_cpu"}


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of every absolute import, also those inside functions."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def import_violations(allowed: set[str], tree: ast.AST, late: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """Imports outside `allowed` and the standard library; those of `late` may stand inside functions."""
    at_import = {line for line, _ in imported_modules(ast.Module([n for n in tree.body if not _is_function(n)], []))}
    found = []
    for line, name in imported_modules(tree):
        package = name.split(".")[0]
        if package not in allowed | set(sys.stdlib_module_names) and (package not in late or line in at_import):
            found.append(f"line {line}: imports {name}")
    return found


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def allowed_in(part: str) -> set[str]:
    ours = OURS.get(part, {part, "deepinfer_hal", "deepinfer_triton"})
    return ours | THIRD_PARTY.get(part, {"torch", "numpy"})


def device_violations(tree: ast.AST) -> list[str]:
    """Vendor modules of torch, device flags, and branches on a device's name."""
    found = []
    for line, name in imported_modules(tree):
        parts = name.split(".")
        if parts[0] in ("torch_npu", "triton") or (parts[0] == "torch" and DEVICE_MODULES & set(parts[1:])):
            found.append(f"line {line}: imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in DEVICE_FLAGS:
                found.append(f"line {node.lineno}: reads .{node.attr}")
            elif node.attr in DEVICE_MODULES and isinstance(node.value, ast.Name) and node.value.id == "torch":
                found.append(f"line {node.lineno}: uses torch.{node.attr}")
        elif isinstance(node, ast.Compare):
            found += [f"line {node.lineno}: compares with {name!r}" for name in _device_strings([node.left, *node.comparators])]
        elif isinstance(node, ast.MatchValue):
            found += [f"line {node.lineno}: matches {name!r}" for name in _device_strings([node.value])]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            found += [f"line {node.lineno}: tests for the prefix {name!r}" for name in _device_strings(node.args)]
    return found


def _device_strings(nodes: list[ast.expr]) -> list[str]:
    """Device names among the nodes, or inside their tuples, lists, sets and dictionary keys; `cuda:0` counts as `cuda`."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.split(":")[0].lower() in DEVICE_NAMES:
                found.append(node.value)
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            found += _device_strings(node.elts)
        elif isinstance(node, ast.Dict):
            found += _device_strings([key for key in node.keys if key is not None])
    return found


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_its_layer_allows(part):
    wrong = [
        f"{path.relative_to(ROOT)} {one}"
        for path in python_files(PARTS[part])
        for one in import_violations(allowed_in(part), parse(path), LATE.get(path, frozenset()))
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_above_the_hal_line_knows_a_device():
    files = python_files(PARTS["deepinfer"])
    wrong = [f"{path.relative_to(ROOT)} {one}" for path in files for one in device_violations(parse(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.cuda",
        "from torch import cuda",
        "def f():\n    import torch_npu",
        "from triton.language import core",
        "import torch\ntorch.cuda.synchronize()",
        "import torch\ntorch.npu.synchronize()",
        "if device.type == 'cuda': pass",
        "if 'npu' != name: pass",
        "if name in ('cpu', 'cuda'): pass",
        "if tensor.is_cuda: pass",
        "if name.startswith('cuda'): pass",
        "match name:\n    case 'ascend': pass",
        "if name == 'cuda:0': pass",
    ],
)
def test_each_way_to_know_a_device_is_noticed(source):
    assert device_violations(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["'''Runs on cuda and npu.'''", "print('cpu')", "if kind == 'window': pass", "backend.device(0)", "x = options['cuda']"],
)
def test_texts_may_name_devices(source):
    assert not device_violations(ast.parse(source))


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("deepinfer_hal", "import msgspec"),
        ("deepinfer_hal", "def f():\n    from deepinfer.errors import ConfigError"),
        ("deepinfer_cpu", "import deepinfer"),
        ("deepinfer", "import deepinfer_cpu"),
        ("deepinfer", "import requests"),
    ],
)
def test_each_forbidden_import_is_noticed(part, source):
    assert import_violations(allowed_in(part), ast.parse(source))


def test_a_late_import_is_allowed_inside_a_function_alone():
    late = {"hypothesis"}
    assert not import_violations({"torch"}, ast.parse("def f():\n    import hypothesis"), late)
    assert import_violations({"torch"}, ast.parse("import hypothesis"), late)
    assert import_violations({"torch"}, ast.parse("if True:\n    import hypothesis"), late)


BLOCKED = ("msgspec", "typer", "click", "rich", "deepinfer_cpu")

_BLOCKER = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # makes `import name` raise
sys.path[:0] = {path!r}
import {module}
"""


@pytest.mark.parametrize("module", ["deepinfer.model.reference", "deepinfer.model.reference_io"])
def test_the_reference_network_needs_neither_configuration_nor_cli_packages(module):
    path = [str(ROOT), str(ROOT / "hal")]
    program = _BLOCKER.format(blocked=BLOCKED, path=path, module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_trainer_imports_only_the_four_packages_it_promises():
    folder = ROOT / "tools" / "nano"
    own = {path.stem for path in python_files(folder)} | {"tools"}
    allowed = {"torch", "numpy", "safetensors", "tokenizers", "deepinfer", "deepinfer_hal"} | own
    wrong = [
        f"{path.name} {one}"
        for path in python_files(folder)
        for one in import_violations(allowed, parse(path), LATE.get(path, frozenset()))
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_the_package_loads_neither_torch_nor_a_backend():
    program = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'hal')]!r}; import deepinfer; "
        "print([name for name in ('torch', 'numpy', 'deepinfer_cpu') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
