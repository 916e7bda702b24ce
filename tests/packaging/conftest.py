"""The wheel, installed into an environment of its own, away from the source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.linked import linked_environment

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is built from: building leaves files behind."""
    copy = tmp_path_factory.mktemp("source")
    for folder in ("vllm_dsv4", "kernels"):
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    for name in SOURCES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel and everything that this project is tested with.

    Attributes:
        folder: of the environment.
        empty: a folder to work in, with nothing of the source tree.
    """

    folder: Path
    empty: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(
        self, *arguments: str, path: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run its Python, with nothing of vLLM's or ours in the environment but what is given.

        Args:
            path: a folder of further packages.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "PYTHON", "TRITON_", "PYTEST_"))
        }
        extra = {"PYTHONPATH": str(path)} if path else {}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=self.empty,
            env={**kept, "VLLM_CACHE_ROOT": str(self.empty / "cache"), **extra, **environment},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def tell(self, script: str, path: Path | None = None, **environment: str) -> Any:
        """The JSON that a script prints as its last line."""
        file = self.empty / "script.py"
        file.write_text(script)
        done = self.run(str(file), path=path, **environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Its own site-packages links to every package of this environment but ours."""
    folder = tmp_path_factory.mktemp("environment")
    linked_environment(folder)
    pip(
        "--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)
    )
    return Installation(folder, tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[..., Path]:
    """``plugin(name, code, **groups)``: a folder with another plugin in it, to put on the path."""
    from tests.support.fake_distribution import add_distribution

    def make(name: str, code: str, **points: str) -> Path:
        (tmp_path / f"{name}.py").write_text(code)
        groups = {f"vllm.{group}": {name: value} for group, value in points.items()}
        add_distribution(tmp_path, name, "1.0", groups)
        return tmp_path

    return make


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
