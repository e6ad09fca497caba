"""Every error a user of `deepinfer` can meet, in one hierarchy below `DeepInferError`.

Each carries what a program needs to react (field, file, tensor, parameter) beside a one-line message that says what was
wrong, where, and what would be right.
"""

from __future__ import annotations

from typing import Any

from deepinfer_hal.errors import (
    BackendContractError,
    BackendError,
    BackendUnavailable,
    BadCall,
    CommunicatorError,
    CommunicatorMismatch,
    CommunicatorTimeout,
    DeepInferError,
    Unsupported,
)


class ConfigError(DeepInferError, ValueError):
    """A configuration is wrong, and nothing was loaded. `field` is the key's path, e.g. `text_config.head_dim`."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(f"{field}: {message}" if field else message)


class CapacityError(DeepInferError, RuntimeError):
    """The memory plan does not hold what was asked. `needed_bytes` and `available_bytes` are None where unknown."""

    def __init__(self, message: str, needed_bytes: int | None = None, available_bytes: int | None = None) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        super().__init__(message)


class RequestError(DeepInferError, ValueError):
    """One request is invalid and fails alone. `param` names the parameter (`prompt` included), `value` what it was."""

    def __init__(self, param: str, value: Any, message: str) -> None:
        self.param = param
        self.value = value
        super().__init__(f"{param}={_shorten(value)}: {message}")


class EngineStopped(DeepInferError, RuntimeError):
    """The engine was shut down, or its thread died; then `__cause__` says why."""


class CheckpointError(DeepInferError):
    """One thing wrong with a checkpoint. `file`, `tensor` and `nbytes` say where, or are None where they do not apply.

    `nbytes` is the size in bytes the message speaks of: what the tensor should take, or where the file ends.
    """

    def __init__(
        self, message: str, *, file: str | None = None, tensor: str | None = None, nbytes: int | None = None
    ) -> None:
        self.file = file
        self.tensor = tensor
        self.nbytes = nbytes
        self.problems: tuple[CheckpointError, ...] = (self,)
        where = [part for part in (file, tensor) if part]
        tail = f" [{nbytes} bytes]" if nbytes is not None else ""
        super().__init__(f"{': '.join([*where, message])}{tail}")


class MissingFile(CheckpointError):
    """The folder lacks a file that every checkpoint has (config.json, an index or a single shard)."""


class BadIndex(CheckpointError):
    """model.safetensors.index.json is not the JSON it must be, or disagrees with the shards."""


class MissingShard(CheckpointError):
    """The index names a shard that is not in the folder."""


class BadHeader(CheckpointError):
    """A shard's safetensors header is malformed: length, JSON, keys, offsets, overlaps or gaps."""


class TruncatedShard(CheckpointError):
    """A shard is shorter than its header says."""


class OversizedShard(CheckpointError):
    """A shard has bytes after the last tensor its header describes."""


class MissingTensor(CheckpointError):
    """The configuration asks for a tensor that no shard has."""


class UnexpectedTensor(CheckpointError):
    """A shard has a tensor that the configuration does not ask for."""


class DuplicateTensor(CheckpointError):
    """Two shards, or two spellings of one name, give the same tensor."""


class WrongShape(CheckpointError):
    """A tensor's shape is not the one that follows from the configuration."""


class WrongDtype(CheckpointError):
    """A tensor's type is not the one of the released format."""


class ChecksumMismatch(CheckpointError):
    """A file's SHA-256 is not the one its folder's SHA256SUMS gives."""


class BadScale(CheckpointError):
    """A scale is not a number: a ue8m0 byte 255, or an e4m3 byte 127 or 255."""


class NotRunnable(CheckpointError):
    """The checkpoint was opened for planning only (headers or index), and something asked for its values."""


def _shorten(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


__all__ = [
    "BackendContractError",
    "BackendError",
    "BackendUnavailable",
    "BadCall",
    "BadHeader",
    "BadIndex",
    "BadScale",
    "CapacityError",
    "CheckpointError",
    "ChecksumMismatch",
    "CommunicatorError",
    "CommunicatorMismatch",
    "CommunicatorTimeout",
    "ConfigError",
    "DeepInferError",
    "DuplicateTensor",
    "EngineStopped",
    "MissingFile",
    "MissingShard",
    "MissingTensor",
    "NotRunnable",
    "OversizedShard",
    "RequestError",
    "TruncatedShard",
    "UnexpectedTensor",
    "Unsupported",
    "WrongDtype",
    "WrongShape",
]
