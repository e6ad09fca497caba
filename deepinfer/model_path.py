"""From what a user calls a model to the folder of its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer.errors import ConfigError

PACKAGED_MODELS = Path(__file__).parent / "models"


def packaged_models() -> list[str]:
    """Names of the checkpoints that ship with the package."""
    if not PACKAGED_MODELS.is_dir():
        return []
    return sorted(folder.name for folder in PACKAGED_MODELS.iterdir() if (folder / "config.json").is_file())


def resolve_model(name_or_dir: str | os.PathLike[str]) -> Path:
    """The folder of a packaged checkpoint (`nano`) or of the given path. Raises ConfigError.

    A packaged name wins over a folder of the same name below the current one: write `./nano` for that.
    """
    name = os.fspath(name_or_dir)
    if not name:
        raise ConfigError("model", f"is empty: give {_choices()}")
    if name in packaged_models():
        return PACKAGED_MODELS / name
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise ConfigError("model", f"{name} has no config.json: give {_choices()}")
    if path.is_file():
        raise ConfigError("model", f"{name} is a file: give the folder it lies in")
    raise ConfigError("model", f"{name!r} is no folder, and nothing is downloaded: give {_choices()}")


def _choices() -> str:
    names = packaged_models()
    return "the folder of a checkpoint" + (f", or {' or '.join(names)}" if names else "")
