"""Distributions that exist as metadata only, for tests of what is read from metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def add_distribution(
    folder: Path,
    name: str,
    version: str,
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Make ``folder``, once it is on ``sys.path``, hold a distribution.

    Args:
        entry_points: group to name to value.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in (entry_points or {}).items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
