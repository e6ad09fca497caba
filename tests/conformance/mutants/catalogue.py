"""All mutants of kernels."""

from __future__ import annotations

from tests.conformance.mutants import attention, caches, contract, formats, gemm, moe, residual, selection, tokens, weights
from tests.conformance.mutants._base import Mutant

FAMILIES: dict[str, list[Mutant]] = {
    module.__name__.rpartition(".")[2]: module.MUTANTS
    for module in (formats, caches, attention, selection, gemm, moe, residual, tokens, weights, contract)
}

KERNEL_MUTANTS = [mutant for family in FAMILIES.values() for mutant in family]
