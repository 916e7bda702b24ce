"""Source of a vLLM by version or path, without installing it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from vllm_dsv4.commands.contract.source import Package
from vllm_dsv4.commands.contract.uses import THEIRS
from vllm_dsv4.versions import installed_vllm


class ObtainError(Exception):
    """There is no such vLLM; the message says what was tried."""


@contextmanager
def obtain(version_or_path: str) -> Iterator[tuple[str, Package]]:
    """A name for the reports, and the package. Valid within the context.

    Args:
        version_or_path: a wheel, a folder that holds ``vllm``, that folder itself, or a version:
            the installed one is read in place, another is fetched with pip into a temporary folder.

    Raises:
        ObtainError: it cannot be had.
    """
    path = Path(version_or_path)
    if path.exists():
        yield _named(path), _open(path)
        return
    if not re.fullmatch(r"\d+(\.\w+)*(\+[\w.]+)?", version_or_path):
        raise ObtainError(f"{version_or_path!r} is neither a path that exists nor a version.")
    installed = installed_vllm()
    if installed is not None and version_or_path in (installed, installed.split("+")[0]):
        yield f"vLLM {installed}", _open(installed_folder())
        return
    with tempfile.TemporaryDirectory() as folder:
        yield f"vLLM {version_or_path}", _open(_download(version_or_path, Path(folder)))


def installed_folder() -> Path:
    """The installed vLLM's folder, found without importing it."""
    spec = find_spec(THEIRS)
    if spec is None or spec.origin is None:
        raise ObtainError("no vLLM is installed.")
    return Path(spec.origin).parent


def _open(path: Path) -> Package:
    try:
        return Package.open(THEIRS, path)
    except FileNotFoundError as error:
        raise ObtainError(f"{error}.") from error


def _named(path: Path) -> str:
    """The version if the wheel's name or metadata beside the package tells it, else the path."""
    if path.suffix == ".whl":
        return f"vLLM {path.name.split('-')[1]}"
    root = path.parent if path.name == THEIRS else path
    versions = sorted(root.glob(f"{THEIRS}-*.dist-info"))
    return f"vLLM {versions[0].name.split('-')[1].removesuffix('.dist')}" if versions else str(path)


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{THEIRS}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ObtainError(f"pip has no vLLM {version}: {last}")
    return wheels[0]
