"""Refuses to import when another distribution owns the name `deepinfer`.

Two distributions that install into one folder overwrite each other's files, and what runs then is a mixture of both. Ours
lists this very file among its own (RECORD in its metadata); one that is called `deepinfer` and does not is another. Only
metadata folders that start with the name are looked at, so an import costs a few directory listings and one small file.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

_THIS_FILE = "deepinfer/_ownership.py"


def foreign_owner(package_file: str, search_path: list[str] | None = None) -> str | None:
    """Name and version of another distribution called `deepinfer` in the folder this package came from, or None.

    package_file: our package's `__file__`. Elsewhere on the path such a distribution is merely shadowed, and one without
    a RECORD (a development install) proves nothing.
    """
    folder = Path(package_file).resolve().parent.parent
    where = {"path": search_path} if search_path is not None else {}
    for found in importlib.metadata.distributions(name="deepinfer", **where):
        if Path(str(found.locate_file(""))).resolve() != folder:
            continue
        record = found.read_text("RECORD")
        if record is not None and _THIS_FILE not in record:
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
