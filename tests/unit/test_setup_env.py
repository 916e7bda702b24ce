"""The set-up repeats a step only when what it depends on has changed, and says what went wrong."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


class FakePip:
    """Records what would be installed; fails for arguments that contain ``broken``."""

    def __init__(self, tool: ModuleType) -> None:
        self.tool = tool
        self.installed: list[str] = []
        self.broken: str | None = None

    def install(self, *arguments: str) -> None:
        if self.broken and self.broken in arguments[-1]:
            raise self.tool.SetupFailed(f"pip failed: {arguments[-1]}")
        self.installed.append(arguments[-1])

    def runs(self, environment: object) -> list[str]:
        """What a set-up of ``environment`` installs."""
        self.installed = []
        self.tool.set_up(environment)
        return self.installed


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/setup_env.py, with the project's root and files replaced by small ones."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_env", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").write_text("numpy==2\ntorch==2.13.0+cpu\n")
    (tmp_path / "requirements" / "dev.txt").write_text("pytest==9\n")
    (tmp_path / "tools" / "vllm_metadata").mkdir(parents=True)
    for name in ("tools/vllm_metadata/pyproject.toml", "setup.py", "pyproject.toml"):
        (tmp_path / name).write_text("first")
    return module


@pytest.fixture
def pip(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(tool)
    monkeypatch.setattr(tool.Environment, "pip_install", lambda _self, *args: fake.install(*args))
    monkeypatch.setattr(tool.Environment, "works", lambda _environment: True)
    return fake


@pytest.fixture
def environment(tool: ModuleType, tmp_path: Path) -> object:
    folder = tmp_path / "venv"
    folder.mkdir()
    return tool.Environment(folder, None)


def test_a_second_set_up_installs_nothing(pip: FakePip, environment: object) -> None:
    assert pip.runs(environment) == [
        "torch==2.13.0+cpu",
        "requirements/cpu.txt",
        "./tools/vllm_metadata",
        "requirements/dev.txt",
        ".",
    ]
    assert pip.runs(environment) == []


def test_a_changed_requirements_file_repeats_its_step_only(
    pip: FakePip, environment: object, tmp_path: Path
) -> None:
    pip.runs(environment)
    (tmp_path / "requirements" / "dev.txt").write_text("pytest==10\n")
    assert pip.runs(environment) == ["requirements/dev.txt"]


def test_a_failed_step_is_tried_again_and_earlier_ones_are_not(
    tool: ModuleType, pip: FakePip, environment: object
) -> None:
    pip.broken = "dev.txt"
    with pytest.raises(tool.SetupFailed):
        pip.runs(environment)
    pip.broken = None
    assert pip.runs(environment) == ["requirements/dev.txt", "."]


def test_without_a_cpu_build_of_torch_the_variable_to_set_is_named(
    tool: ModuleType, pip: FakePip, environment: object
) -> None:
    pip.broken = "torch"
    with pytest.raises(tool.SetupFailed, match="make setup TORCH_INDEX=URL"):
        pip.runs(environment)
    assert pip.installed == []


def test_another_python_is_refused(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "PYTHON", (2, 7))
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    assert tool.main() == 2
    assert "name another: make setup PYTHON=python3.11" in capsys.readouterr().err
