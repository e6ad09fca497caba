"""A bound call whose kernel is chosen when it is called, because what was known at binding did not decide.

Parts of a composite are bound knowing nothing, and a caller need not know a weight's format. A kernel that serves some calls only
must refuse such a binding; here it is asked again with the statics of the call itself, once for each kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_hal.card import OpCard
from deepinfer_hal.errors import BackendContractError, Unsupported
from deepinfer_hal.kernel import Kernel, No, Yes
from deepinfer_hal.statics import call_form, call_kind, call_spec

Settled = Callable[[Kernel, list[str]], None]
"""Told the kernel that serves a kind of call, and why others do not."""

MOST_KINDS = 1024
"""Kinds and forms of call that are remembered; sizes that change from step to step would add to them without end."""


class LateCall:
    """Calls the first kernel that answers Yes to the call at hand: `kernels` by priority, the last resort at the end.

    Raises Unsupported, beginning with `nobody` and with every kernel's reason, for a call that none serves; others go on.
    """

    def __init__(
        self, card: OpCard, kernels: Sequence[Kernel], batch_invariant: bool, settled: Settled, nobody: str = ""
    ) -> None:
        self.nobody = nobody or f"no kernel serves this call of op {card.name!r}"
        self.card, self.kernels, self.batch_invariant, self.settled = card, kernels, batch_invariant, settled
        self._known: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._seen: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._count, self._form_of = len(card.signature), call_form(card)

    def __call__(self, *args: Any, **named: Any) -> None:
        if named or len(args) != self._count:
            args = tuple(self.card.bind_args(args, named).values())
        form = self._form_of(args)
        call = self._seen.get(form)
        if call is None:
            call = self._of_kind(form, args)
        call(*args)

    def _of_kind(self, form: tuple[Any, ...], args: tuple[Any, ...]) -> Callable[..., None]:
        """What serves calls of this kind, chosen at the first one; remembered by form, which takes less to tell."""
        if len(self._seen) >= MOST_KINDS:
            self._seen.clear()
        kind = call_kind(form)
        call = self._known.get(kind)
        if call is None:
            if len(self._known) >= MOST_KINDS:
                self._known.clear()
            call = self._known[kind] = self._choose(args)
        self._seen[form] = call
        return call

    def _choose(self, args: tuple[Any, ...]) -> Callable[..., None]:
        spec = call_spec(self.card, dict(zip(self.card.arg_names, args, strict=True)), self.batch_invariant)
        refused = []
        for kernel in self.kernels:
            answer = kernel.supports(spec)
            if isinstance(answer, Yes):
                self.settled(kernel, refused)
                return kernel.fn
            if not isinstance(answer, No):
                raise BackendContractError(f"{kernel.symbol}: supports() must answer Yes or No, got {answer!r}")
            refused.append(f"{kernel.symbol}: {answer.reason}")
        raise Unsupported(f"{self.nobody}: " + "; ".join(refused))
