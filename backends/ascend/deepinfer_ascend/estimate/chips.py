"""The chips that estimates are made for: clock, products a cycle, and what their cores share."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_hal.errors import BadCall

PUBLIC_KERNEL = "figures published with the public Ascend 950 sparse attention kernel"
ANNOUNCED = "announced at Huawei Connect 2025"


@dataclass(frozen=True)
class Chip:
    """One chip. macs: multiply-adds a cycle of one cube core, by type of the operands. Rates are decimal bytes a second."""

    name: str
    soc: str
    hbm_bytes_s: float
    cores: int = 32
    hertz: float = 1.65e9
    l2_bytes_s: float = 5e12
    macs: tuple[tuple[str, int], ...] = (("bf16", 4096), ("fp8", 8192), ("fp4", 16384), ("f32", 256))

    def peak_flops(self, kind: str, cores: int) -> float:
        """FLOPs a second of `cores` cube cores for operands of one type."""
        return 2.0 * dict(self.macs)[kind] * self.hertz * cores

    def shared_bytes_a_cycle(self, bytes_s: float, cores: int) -> float:
        """The part of a shared rate that `cores` of all cores get, in bytes a cycle."""
        return bytes_s / self.hertz * cores / self.cores


CHIPS = {
    "950DT": Chip("950DT", "Ascend950DT_9581", 4.0e12),
    "950PR": Chip("950PR", "Ascend950PR_9589", 1.6e12),
}

SOURCES = {
    "cores, clock": f"32 cores at about 1.65 GHz: {PUBLIC_KERNEL}",
    "bf16 products": f"4096 a cycle a core: {PUBLIC_KERNEL}; page NPU architecture 351x (16x16x16 a cycle)",
    "fp8 products": "page NPU architecture 351x (16x32x16 of 8-bit operands a cycle)",
    "fp4 products": f"twice FP8 (2 against 1 PFLOPS), {ANNOUNCED}",
    "f32 products": f"assumed: a sixteenth of BF16, after what is said of float32 products in the {PUBLIC_KERNEL}",
    "HBM": f"4 TB/s (950DT), 1.6 TB/s (950PR): {ANNOUNCED}",
    "L2": f"about 5 TB/s: {PUBLIC_KERNEL}",
}
"""Where the sheets' numbers come from."""


def find_chip(name: str) -> Chip:
    """A chip by its name; BadCall for another name."""
    if name not in CHIPS:
        raise BadCall(f"no sheet of a chip named {name!r}; there are {', '.join(CHIPS)}")
    return CHIPS[name]
