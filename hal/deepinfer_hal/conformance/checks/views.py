"""Row-strided inputs and outputs where the card's cases use them: the same bits; other strides are refused."""

import functools

import torch

from deepinfer_hal.checks import check_call
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import assert_same_bits
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed
from deepinfer_hal.errors import BadCall

GAP_ELEMENTS = 32


@functools.cache
def strided_args(card) -> frozenset[str]:
    """Arguments that some case of the card gives with space between the rows."""
    from deepinfer_hal.weights import prepare_canonical

    found = set()
    for case in card.enumerate_cases():
        if not {"strided", "padding", "gap", "view"} & set(case.params):
            continue
        args = card.generate(case, 0, "cpu", prepare_canonical)
        tensors = {name: value for name, value in args.items() if isinstance(value, torch.Tensor)}
        found |= {n for n, t in tensors.items() if t.dim() > 1 and t.shape[0] > 1 and not t.is_contiguous()}
    return frozenset(found)


def run(problem: Problem, profile: Profile) -> None:
    for why, got in (
        ("as views of wider rows", problem.run(gaps=gaps_of(problem)).args), ("as dense rows", problem.run(_dense(problem)).args)
    ):  # fmt: skip
        for name in problem.outputs:
            assert_same_bits(got[name], problem.base[name], name, why)
    _assert_refused(problem)


def gaps_of(problem: Problem) -> dict[str, int]:
    """Elements to leave between the rows of each argument that may have them."""
    names = strided_args(problem.card)
    return {name: GAP_ELEMENTS for name in names if isinstance(problem.pristine[name], torch.Tensor)}


def _dense(problem: Problem) -> dict:
    alone = [v for v in problem.pristine.values() if isinstance(v, torch.Tensor)]
    shared = {v.untyped_storage().data_ptr() for v in alone if sum(_same(v, w) for w in alone) > 1}
    dense = dict(problem.pristine)
    for name, value in dense.items():
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in shared:
            dense[name] = value.contiguous()
    return dense


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and b.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _assert_refused(problem: Problem) -> None:
    """A last dimension that is not contiguous is no legal argument: BadCall by the card's check."""
    for arg in problem.card.signature:
        value = problem.pristine[arg.name]
        if arg.is_tensor and value is not None and value.dim() > 1 and value.numel() and value.shape[-1] > 1:
            twice = torch.empty(*value.shape[:-1], 2 * value.shape[-1], dtype=value.dtype)[..., ::2]
            try:
                check_call(problem.card, {**problem.pristine, arg.name: twice})
            except BadCall:
                return
            raise CheckFailed(f"{arg.name} with a stride of 2 between its values was not refused")


CHECK = Check("views", "Rows of a wider buffer give the same bits, and other strides are refused.", run)
