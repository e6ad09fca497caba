"""Refuses to import when another distribution owns the name `deepinfer`.

Two distributions that install into one folder overwrite each other's files, and what runs then is a mixture of both.
Ours lists this very file in its RECORD; a distribution called `deepinfer` that does not is another. Only the folder
that this package came from is looked at: elsewhere on the path a namesake is merely shadowed.
"""

from __future__ import annotations

from pathlib import Path


def foreign_owner(package_file: str) -> str | None:
    """Name and version of another distribution called `deepinfer` beside our package, or None.

    package_file: our package's `__file__`.
    """
    folder = Path(package_file).resolve().parent.parent
    for record in folder.glob("deepinfer-*.dist-info/RECORD"):
        if "deepinfer/_ownership.py" not in record.read_text(encoding="utf-8", errors="replace"):
            return record.parent.name.removesuffix(".dist-info").replace("-", " ", 1)
    return None


def require_sole_owner(package_file: str) -> None:
    """Raise ImportError, in one sentence, if `foreign_owner` finds one."""
    owner = foreign_owner(package_file)
    if owner is not None:
        raise ImportError(
            f"another distribution ({owner}) owns the name 'deepinfer' in this environment: "
            "uninstall it, then install this one again"
        )
