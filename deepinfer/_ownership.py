"""Refuses to import when another distribution owns the name `deepinfer`.

Two distributions that install into one folder overwrite each other's files, and what runs then is a mixture of both.
Ours is told from others by a marker in its metadata: the summary line of pyproject.toml. Only distributions whose
metadata folder starts with the name are looked at, so that an import costs a few directory listings and no more.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

OUR_SUMMARY = "DeepSeek-V4.1 inference over one hardware abstraction layer"


def foreign_owner(package_file: str, search_path: list[str] | None = None) -> str | None:
    """Name and version of an installed distribution called `deepinfer` that is not ours, or None.

    `package_file` is our package's `__file__`. A foreign distribution counts only if it lists that very file among its
    own, or lives in the folder our package was imported from: elsewhere on the path it is merely shadowed.
    """
    folder = Path(package_file).resolve().parent.parent
    where = {"path": search_path} if search_path is not None else {}
    for found in importlib.metadata.distributions(name="deepinfer", **where):
        if found.metadata["Summary"] == OUR_SUMMARY:
            continue
        if Path(str(found.locate_file(""))).resolve() == folder:
            return f"{found.metadata['Name']} {found.version}"
    return None


def require_sole_owner(package_file: str) -> None:
    """Raise ImportError, in one sentence, if `foreign_owner` finds one."""
    owner = foreign_owner(package_file)
    if owner is not None:
        raise ImportError(
            f"another distribution ({owner}) owns the name 'deepinfer' in this environment: "
            "uninstall it, then install this one again"
        )
