"""What ptxas says of each kernel (`-Xptxas -v`): registers, shared memory, and local memory, which a hot kernel must not use."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict, dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_LOSS = re.compile(r"Potential Performance Loss: (.*?) in the function '([^']+)'")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class KernelReport:
    """One kernel on one architecture. Bytes of stack and spills are per thread; shared_bytes is what is static; loss: what
    the compiler says it had to give up, such as products in flight."""

    name: str
    architecture: str
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    loss: str = ""

    @property
    def objection(self) -> str | None:
        """Why the kernel is too slow to ship, or None."""
        if self.spill_store_bytes or self.spill_load_bytes:
            return f"spills {self.spill_store_bytes} bytes a thread and loads {self.spill_load_bytes}"
        if self.loss:
            return f"loses speed: {self.loss}"
        return f"keeps {self.stack_bytes} bytes a thread in local memory" if self.stack_bytes else None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def read_ptxas(text: str) -> list[KernelReport]:
    """The kernels of a compiler's output. Functions that are no kernels, but are called by some, count with none."""
    found: list[KernelReport] = []
    losses = {loss[2]: loss[1] for loss in _LOSS.finditer(text)}
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            found.append(KernelReport(entry[1], entry[2]))
        elif found and (properties := _PROPERTIES.search(line)):
            kernel = found[-1]
            kernel.stack_bytes, kernel.spill_store_bytes, kernel.spill_load_bytes = map(int, properties.groups())
        elif found and (used := _USED.search(line)):
            shared = _SHARED.search(line)
            found[-1].registers, found[-1].shared_bytes = int(used[1]), int(shared[1]) if shared else 0
    for kernel in found:
        kernel.loss = losses.get(kernel.name, "")
    return found


def readable(name: str) -> str:
    """A kernel's name as its source has it, where the toolchain's demangler is at hand."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None:
        return name
    done = subprocess.run([tool, name], capture_output=True, text=True, check=False)
    return done.stdout.strip() or name
