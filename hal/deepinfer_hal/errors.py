"""The root of the one error hierarchy, and the errors that the HAL itself raises.

`deepinfer.errors` re-exports these and adds the errors of the layers above. Every message says what was wrong, where,
and what would be right. Raise the most specific class; callers may catch `DeepInferError` to catch them all.
"""

from __future__ import annotations


class DeepInferError(Exception):
    """Root of every error that this project raises on purpose."""


class BadCall(DeepInferError, ValueError):
    """An op was called with an input its card forbids. Raised before anything is launched or written."""


class Unsupported(DeepInferError, NotImplementedError):
    """The input is legal, but no implementation at hand serves it (and falling back was not allowed)."""


class BackendError(DeepInferError, RuntimeError):
    """A backend or its device failed while doing what it was asked."""


class BackendContractError(BackendError):
    """A backend class or its answer breaks the contract of the HAL; `mistakes` lists every one found."""

    def __init__(self, message: str, mistakes: tuple[str, ...] = ()) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(message if not mistakes else message + "".join(f"\n  - {one}" for one in self.mistakes))


class BackendUnavailable(BackendError):
    """No backend of that name can be used on this machine; the vendor's own error is kept as `__cause__`."""


class CommunicatorError(BackendError):
    """Ranks cannot go on together; `ranks` are those at fault, empty where nobody can tell."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class CommunicatorTimeout(CommunicatorError):
    """A rank died, left, or did not come within the deadline; `ranks` names every such rank."""


class CommunicatorMismatch(CommunicatorError, BadCall):
    """Ranks met in different calls; nothing was moved. `ranks` differ from what most ranks called."""


__all__ = [
    "BackendContractError",
    "BackendError",
    "BackendUnavailable",
    "BadCall",
    "CommunicatorError",
    "CommunicatorMismatch",
    "CommunicatorTimeout",
    "DeepInferError",
    "Unsupported",
]
