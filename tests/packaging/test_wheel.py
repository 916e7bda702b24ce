"""What the wheel holds, and what it says of itself."""

from __future__ import annotations

import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vllm_dsv4.versions import SUPPORTED_VLLM


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def info(names: list[str]) -> str:
    """The metadata folder."""
    return next(n.split("/")[0] for n in names if n.endswith("/METADATA"))


@pytest.fixture(scope="module")
def metadata(wheel: Path, info: str) -> Message:
    return Parser().parsestr(zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode())


def test_everything_lies_under_our_name(names: list[str], info: str) -> None:
    """A top-level package named ``kernels`` or ``tests`` would shadow somebody else's."""
    assert {name.split("/")[0] for name in names} == {"vllm_dsv4", info}


def test_every_source_file_is_in_it(names: list[str], source: Path) -> None:
    package = {str(p.relative_to(source)) for p in (source / "vllm_dsv4").rglob("*.py")}
    kernels = {f"vllm_dsv4/{p.relative_to(source)}" for p in (source / "kernels").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == package | kernels


def test_it_is_typed_and_holds_the_record_of_the_contract(names: list[str]) -> None:
    assert {
        "vllm_dsv4/py.typed",
        "vllm_dsv4/kernels/py.typed",
        "vllm_dsv4/commands/contract/recorded.json",
    } <= set(names)


def test_the_licence_is_in_it(names: list[str], info: str, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert f"{info}/licenses/LICENSE" in names


def test_metadata(metadata: Message, source: Path) -> None:
    assert metadata["Name"] == "vllm-dsv4"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (source / "README.md").read_text().strip()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_it_requires_the_supported_range_of_vllm_and_nothing_else(metadata: Message) -> None:
    (vllm,) = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    low, high = SUPPORTED_VLLM
    assert vllm.name == "vllm"
    assert {str(bound) for bound in vllm.specifier} == {f">={low}", f"<{high}"}


def test_both_entry_points_have_one_name(wheel: Path, info: str) -> None:
    """``VLLM_PLUGINS`` names plugins across groups."""
    points = ConfigParser()
    points.read_string(zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode())
    assert {group: dict(points[group]) for group in points.sections()} == {
        "vllm.platform_plugins": {"dsv4": "vllm_dsv4.entrypoints:platform"},
        "vllm.general_plugins": {"dsv4": "vllm_dsv4.entrypoints:register"},
        "console_scripts": {"vllm-dsv4": "vllm_dsv4.commands.cli.main:main"},
    }
