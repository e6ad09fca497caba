"""Batch invariance: a row's bits do not depend on how many rows there are, their order, or what its neighbours hold."""

from collections.abc import Iterator

import torch

from deepinfer_hal.conformance import rows
from deepinfer_hal.conformance.alone import CUT_APART, alone
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import assert_same_bits
from deepinfer_hal.conformance.problem import Args, Problem


def run(problem: Problem, profile: Profile) -> None:
    if rows.is_row_wise(problem.card, problem.pristine):
        for why, index in orders(problem):
            assert_rows(problem, why, index)
        return
    for why, args, pairs in alone(problem):
        got = problem.run(args).args
        for name, here, there in pairs:
            assert_same_bits(got[name][here], problem.base[name][there], name, why)


def orders(problem: Problem) -> Iterator[tuple[str, list[int]]]:
    """Row lists to run instead of the whole one: (what is different, rows)."""
    n = problem.valid_rows
    for row in sorted({0, n // 2, n - 1}):
        yield f"row {row} alone", [row]
    for size in sorted({2, 5, 6, 16, 17, n - 1} & set(range(2, n))):
        yield f"the first {size} rows", list(range(size))
    if n > 1:
        yield "rows reversed", list(range(n))[::-1]
        order = torch.randperm(n, generator=torch.Generator().manual_seed(problem.seed)).tolist()
        yield "rows shuffled", order
    if not _stores(problem):
        yield "a row among copies of another", [n - 1, n - 1, 0, n - 1]
        yield "every row five times", [row for row in range(n) for _ in range(5)][:160]


def assert_rows(problem: Problem, why: str, index: list[int]) -> None:
    """CheckFailed unless a call with just these rows gives the bits that they have in the whole one."""
    args: Args = rows.take_rows(problem.card, problem.pristine, index)
    got = problem.run(args).args
    per_row = set(rows.row_args(problem.card, problem.pristine))
    whole = sorted(index) == list(range(problem.num_rows))
    for name in problem.outputs:
        if name in per_row:
            assert_same_bits(got[name], problem.base[name][index], name, why)
        elif whole:
            assert_same_bits(got[name], problem.base[name], name, why)


def _stores(problem: Problem) -> bool:
    """Whether rows name the places that they write to, which must be distinct."""
    per_row = set(rows.row_args(problem.card, problem.pristine))
    return any(name not in per_row and name != "counts" for name in problem.outputs)


def applies(problem: Problem) -> bool:
    if problem.empty or problem.kernel.invariant != "yes":
        return False
    return rows.is_row_wise(problem.card, problem.pristine) or problem.card.name in CUT_APART


CHECK = Check("batch", "Bits of a request depend on no batch size, order or neighbour; one row is one of k + 1.", run, applies)
