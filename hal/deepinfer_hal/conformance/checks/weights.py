"""Weight handles: the checkpoint's bytes come back exactly, sizes are as announced, slots are the experts."""

import torch

from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import assert_same_bits
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed
from deepinfer_hal.weights import CanonicalWeight, WeightHandle


def run(problem: Problem, profile: Profile) -> None:
    for name in _weights(problem):
        stored = problem.pristine[name].canonical()
        assert_round_trip(problem, name, stored, problem.weight(problem.pristine[name]))
        if stored.scales is not None and problem.first:
            odd = _every_code(stored)
            assert_round_trip(problem, f"{name} with every code", odd, problem.subject.prepare(problem.pristine[name].role, odd))
    if problem.card.name == "grouped_gemm":
        _assert_experts_move(problem)


def assert_round_trip(problem: Problem, name: str, stored: CanonicalWeight, handle: WeightHandle) -> None:
    """canonical(), shape, nbytes against prepared_nbytes, and each slot."""
    _assert_same(name, handle.canonical(), stored)
    if tuple(handle.shape) != tuple(stored.shape):
        raise CheckFailed(f"{name}: the handle's shape is {list(handle.shape)}, the weight's {list(stored.shape)}")
    backend = problem.subject.backend
    if backend is not None and "every code" not in name:
        announced = backend.prepared_nbytes(handle.role, tuple(stored.shape), stored.format)
        if announced != handle.nbytes:
            raise CheckFailed(f"{name}: prepared_nbytes says {announced} bytes, the handle holds {handle.nbytes}")
    if len(stored.shape) == 3:
        for slot in sorted({0, stored.shape[0] // 2, stored.shape[0] - 1}):
            scales = None if stored.scales is None else stored.scales[slot]
            part = CanonicalWeight(stored.format, stored.values[slot], scales)
            _assert_same(f"slot {slot} of {name}", handle.slot(slot).canonical(), part)


def _assert_same(name: str, got: CanonicalWeight, want: CanonicalWeight) -> None:
    if got.format != want.format:
        raise CheckFailed(f"{name}: canonical() has format {got.format}, was {want.format}")
    for part in ("values", "scales"):
        have, wanted = getattr(got, part), getattr(want, part)
        if (have is None) != (wanted is None):
            raise CheckFailed(f"{name}: canonical() {'lost' if have is None else 'has'} scales")
        if wanted is not None and (have.shape != wanted.shape or bool((bits(have.cpu()) != bits(wanted.cpu())).any())):
            raise CheckFailed(f"{name}: canonical() does not give the checkpoint's {part} back, bit for bit")


def _every_code(stored: CanonicalWeight) -> CanonicalWeight:
    """The same shape with every byte value, and with NaN and the largest scales first, also where there are few."""

    def cycle(like: torch.Tensor, first: int) -> torch.Tensor:
        return ((first + torch.arange(like.numel()) * 249) % 256).to(torch.uint8).reshape(like.shape)

    return CanonicalWeight(stored.format, cycle(stored.values, 0), cycle(stored.scales, 255))


def _assert_experts_move(problem: Problem) -> None:
    """Experts in another place of the stack, with the rows' bounds moved along, give the same rows."""
    args, weight = problem.pristine, problem.pristine["weight"]
    stored, experts = weight.canonical(), weight.shape[0]
    bounds = args["offsets"].tolist()
    order = list(range(experts))[::-1]
    taken = [row for e in order for row in range(bounds[e], bounds[e + 1])]
    lengths = torch.tensor([0] + [bounds[e + 1] - bounds[e] for e in order])
    moved = dict(args)
    for name in ("x", "x_scale", "out", "out_scale"):
        if args[name] is not None:
            moved[name] = args[name].clone()
            moved[name][: len(taken)] = args[name][taken]
    scales = None if stored.scales is None else stored.scales[order]
    moved["weight"] = WeightHandle(weight.role, CanonicalWeight(stored.format, stored.values[order], scales))
    moved["offsets"] = lengths.cumsum(0).to(torch.int32)
    got = problem.run(moved).args
    if problem.kernel.invariant == "yes":
        for name in problem.outputs:
            assert_same_bits(got[name][: len(taken)], problem.base[name][taken], name, "with the experts in reverse")


def _weights(problem: Problem) -> list[str]:
    return [a.name for a in problem.card.signature if a.kind == "weight" and problem.pristine[a.name] is not None]


def applies(problem: Problem) -> bool:
    return not problem.empty and bool(_weights(problem))


CHECK = Check("weights", "A prepared weight is the checkpoint's, exactly, and an expert can be moved.", run, applies)
