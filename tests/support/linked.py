"""Environments whose packages are links to this environment's."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def linked_environment(folder: Path, *left_out: str) -> Path:
    """Make a virtual environment in ``folder``; return its site-packages.

    Args:
        left_out: beginnings of names in site-packages that are not linked, beside this project's.
            Leave out what is to be installed there: over a link, pip would uninstall from where
            the link leads.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("vllm_dsv4", "__editable__", "__pycache__", *left_out)):
            (site / package.name).symlink_to(package)
    return site
