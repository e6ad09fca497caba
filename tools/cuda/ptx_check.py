"""What the PTX of a kernel must and must not hold, per target: the assertions of design section 5 as one pure
function.
"""

from __future__ import annotations

import re

ARCHITECTURE = {"sm90": "sm_90a", "sm100": "sm_100a", "sm103": "sm_103a"}
BLOCK_SCALED = "kind::mxf8f6f4.block_scale"
SPILL_LIMIT_BYTES = 0


def objections(ptx: str, target: str, product: bool, quantised_product: bool, spill_bytes: int) -> list[str]:
    """Everything wrong with a kernel's PTX; empty if it is what the target should get.

    product: the kernel has a matrix product; quantised_product: both of its operands carry scales per 32.
    """
    found = []
    wanted = ARCHITECTURE[target]
    if not re.search(rf"^\.target {wanted}\b", ptx, re.MULTILINE):
        found.append(f"the PTX is not for {wanted}")
    if re.search(r"^\s*trap;", ptx, re.MULTILINE):
        found.append("the compiler put a trap where it could not make the kernel")
    if spill_bytes > SPILL_LIMIT_BYTES:
        found.append(f"{spill_bytes} bytes a thread are spilled to local memory")
    if not product:
        return found
    if target == "sm90":
        if "wgmma.mma_async" not in ptx:
            found.append("the matrix product is not wgmma")
        return found
    kinds = set(re.findall(r"tcgen05\.mma\.\S*?(kind::[\w.]+)", ptx))
    if not kinds:
        found.append("the matrix product is not tcgen05.mma")
    elif quantised_product and any(not kind.startswith(BLOCK_SCALED) for kind in kinds):
        found.append(f"quantised operands meet as {', '.join(sorted(kinds))}, not as {BLOCK_SCALED}")
    return found
