"""Which conformance cases show what a kernel's mutants do, and running them: few and small, but with every loop going round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepinfer_ascend import twin
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.conformance.communication import communication_cases
from deepinfer_hal.conformance.verdict import CheckFailed
from deepinfer_hal.errors import BackendError
from deepinfer_hal.weights import CanonicalWeight

SEED = 5
MOST_BYTES = 8 << 20  # arguments of a case
MOST_INSTRUCTIONS = 600_000  # of a case; the twin runs some ten million a second
ALWAYS_INSTRUCTIONS = 20_000  # the longest case up to here is always taken: loops without a site of their own go round too
ROUNDS = 3  # a site that a core reaches this often has met its own earlier use through two buffers
MORE_CASES = (  # for loops that no case of the cards goes round often enough on two cores
    Case("linear", {"T": 33, "K": 96, "N": 70, "x": "u8", "w": "fp8_block32", "out": "f32"}),
    Case("linear", {"T": 33, "K": 8224, "N": 96, "x": "u8", "w": "fp8_block32", "out": "u8"}),
    Case("linear", {"T": 33, "K": 96, "N": 70, "x": "f32", "w": "bf16", "out": "f32"}),
    Case("ep_dispatch", {"T": 150, "K": 64, "E": 8, "k": 2, "x": "u8", "weights": True}),
    Case("ep_dispatch", {"T": 300, "K": 32, "E": 8, "k": 2, "x": "u8", "holes": "all"}),
    Case("hyper_connection_pre", {"T": 5, "m": 2, "H": 72, "dtype": "f32"}),
    Case("ep_combine", {"T": 150, "H": 64, "k": 2, "dtype": "bf16", "shared": True}),
)
RANK_CASES = ("ranks(op=dispatch_and_combine,world=2)", "ranks(op=dispatch_and_combine,world=4)")
LAUNCHES = ((1, 1), (2, 9))  # (cube cores, seed of the scheduler): few cores, so that each has several tiles or rows


@dataclass
class Found:
    """A case that launches some kernel, and what it reached on one cube core."""

    op: str
    case: Any
    instructions: int
    sites: list
    partners: list[tuple[str, str, str]]
    kernels: set[str] = field(init=False)

    def __post_init__(self):
        self.kernels = {site.kernel for site in self.sites}

    def features(self, kernel: str) -> set:
        """What of a kernel's sites the case shows: that it is reached, how often, with which ids, with a partial mask."""
        reached = set()
        for site in self.sites:
            if site.kernel == kernel:
                key = (site.file, site.line, site.kind, site.detail)
                reached |= {(*key, "rounds", n) for n in range(min(site.count, 2 * ROUNDS) + 1)}
                reached |= {(*key, "value", site.lowest), (*key, "value", site.highest)}
        return reached


def prepare(role: str, canonical: CanonicalWeight) -> Any:
    """A weight in the twin's layout."""
    return AscendBackend().prepare_weight(TWIN_INDEX, role, canonical)


def arguments(op: str, case: Any) -> dict[str, Any]:
    """A case's arguments, always the same."""
    return get_card(op).generate(case, SEED, "cpu", prepare)


def _bytes(args: dict[str, Any]) -> int:
    return sum(t.numel() * t.element_size() for t in args.values() if isinstance(t, torch.Tensor))


def explore(ops: Iterable[str]) -> Iterator[Found]:
    """Runs the cases of ops and yields those that launch something. Raises BackendError if a kernel breaks a rule."""
    module = twin.module()
    for op in ops:
        for case in (*get_card(op).enumerate_cases(), *(c for c in MORE_CASES if c.op == op)):
            args = arguments(op, case)
            if _bytes(args) > MOST_BYTES:
                continue
            stream = module.Stream(cores=LAUNCHES[0][0], seed=LAUNCHES[0][1], trace=True)
            module.record_sites()
            try:
                twin.bind(get_card(op))(**args, stream=stream)
            finally:
                sites, partners = module.recorded_sites(), module.recorded_partners()
                module.stop_mutation()
            rows = len(twin.take_trace(stream).rows)
            if sites and rows <= MOST_INSTRUCTIONS:
                yield Found(op, case, rows, sites, partners)


def explore_ranks() -> Iterator[Found]:
    """The suite's cases of several ranks, all in this process."""
    module = twin.module()
    for case in communication_cases():
        if not case.id.startswith(RANK_CASES):
            continue
        module.record_sites()
        try:
            case.run(AscendBackend(), TWIN_INDEX)
        finally:
            sites, partners = module.recorded_sites(), module.recorded_partners()
            module.stop_mutation()
        yield Found("", case, MOST_INSTRUCTIONS, sites, partners)


def choose(found: list[Found], kernel: str) -> list[Found]:
    """The cases for a kernel: one after another, that which shows most that is new for its length. Cheapest first."""
    left = [f for f in found if kernel in f.kernels and f.op]
    chosen = sorted((f for f in left if f.instructions <= ALWAYS_INSTRUCTIONS), key=lambda f: f.instructions)[-1:]
    left = [f for f in left if f not in chosen]
    seen = set().union(*(f.features(kernel) for f in chosen))
    while left:
        best = max(left, key=lambda f: (len(f.features(kernel) - seen) / (f.instructions + 500), -f.instructions))
        if not best.features(kernel) - seen:
            break
        chosen.append(best)
        seen |= best.features(kernel)
        left.remove(best)
    return sorted(chosen, key=lambda f: f.instructions)


@dataclass
class Ready:
    """A case with arguments and what a call leaves of them on the unchanged kernel."""

    op: str
    args: dict[str, Any]
    cores: int
    seed: int
    expected: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self) -> tuple[str, bool]:
        """What the twin reports of a call, and whether it leaves the expected bits. Uses the arguments up."""
        stream = twin.module().Stream(cores=self.cores, seed=self.seed)
        try:
            twin.bind(get_card(self.op))(**self.args, stream=stream)
        except BackendError as error:
            return str(error), False
        same = all(torch.equal(_bits(self.args[name]), bits) for name, bits in self.expected.items())
        return "", same


@dataclass
class ReadyRanks:
    """A case of several ranks, which checks its results itself."""

    case: Any

    def run(self) -> tuple[str, bool]:
        """What the twin reports, and whether the results are right."""
        try:
            self.case.run(AscendBackend(), TWIN_INDEX)
        except CheckFailed as failed:
            if "raised RuntimeError" in str(failed):
                raise
            reported = "BackendError" in str(failed) or "CommunicatorTimeout" in str(failed)
            return (str(failed) if reported else ""), False
        return "", True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).clone()


def with_bad_rows(op: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a NaN in the first column of every float input: what is done for bad rows is done in each."""
    for arg in get_card(op).signature:
        value = args.get(arg.name)
        if arg.kind in ("in", "inout") and value is not None and value.is_floating_point() and value.ndim > 1:
            value[..., 0] = torch.nan
    return args


def make_ready(found: Iterable[Found], bad_rows: bool = False) -> list[Ready | ReadyRanks]:
    """Cases with their expected results, each for every way of LAUNCHES; raises if an unchanged kernel is reported."""
    ready = []
    change = with_bad_rows if bad_rows else lambda op, args: args
    for f in found:
        if not f.op:
            ready.append(ReadyRanks(f.case))
            continue
        for cores, seed in LAUNCHES:
            first = Ready(f.op, change(f.op, arguments(f.op, f.case)), cores, seed)
            again = change(f.op, arguments(f.op, f.case))
            report, _ = first.run()
            if report:
                raise BackendError(f"{f.case.id} without a change on {cores} cores: {report}")
            written = [arg.name for arg in get_card(f.op).signature if arg.is_tensor and first.args[arg.name] is not None]
            ready.append(Ready(f.op, again, cores, seed, {name: _bits(first.args[name]) for name in written}))
    return ready
