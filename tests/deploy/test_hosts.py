"""The compose file and the systemd units: their form, and what must agree between their lines."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import compose_spec
import pytest

from tests.support.compose import COMPOSE, services

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
UNITS = ("vllm-dsv4.service", "vllm-dsv4-ray.service")


def test_the_compose_file_is_one() -> None:
    compose_spec.PyCompose.from_yaml(COMPOSE.read_text()).validate()


def test_a_compose_file_with_a_misspelt_size_is_none() -> None:
    with pytest.raises(ValueError):
        compose_spec.PyCompose.from_yaml("services: {a: {image: b, shm_size: much}}").validate()


def test_every_file_that_the_compose_file_mounts_or_builds_from_is_there() -> None:
    for service in services().values():
        mounted = [volume.split(":")[0] for volume in service.get("volumes", [])]
        assert [m for m in mounted if m.startswith(".") and not (COMPOSE.parent / m).exists()] == []
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", ["cpu", "rocm"])
def test_a_server_that_ends_is_started_again(name: str) -> None:
    assert services()[name]["restart"] == "always"


def test_a_server_on_cards_has_them_and_time_to_load_and_to_end() -> None:
    rocm = services()["rocm"]
    assert rocm["devices"] == ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
    assert rocm["healthcheck"]["start_period"] == "2h"
    assert rocm["environment"]["VLLM_ENGINE_READY_TIMEOUT_S"] == "7200"
    assert rocm["stop_grace_period"] == "2m"
    assert "--shutdown-timeout=90" in rocm["command"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_again_whatever_the_status_and_asks_the_doctor_first(unit: str) -> None:
    text = (SYSTEMD / unit).read_text()
    assert "\nRestart=always\n" in text
    assert "\nStartLimitIntervalSec=0\n" in text
    assert "\nExecStartPre=/opt/vllm-dsv4/bin/vllm-dsv4 doctor\n" in text


def test_the_server_has_time_to_end() -> None:
    stop = re.search(r"^TimeoutStopSec=(\d+)$", (SYSTEMD / UNITS[0]).read_text(), re.MULTILINE)
    drain = re.search(r"--shutdown-timeout=(\d+)", (SYSTEMD / "server.env").read_text())
    assert stop
    assert drain
    assert int(stop[1]) > int(drain[1])


def verify(folder: Path) -> str:
    """What systemd says of the units in ``folder``."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(folder / unit for unit in UNITS)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture
def installed_units(tmp_path: Path) -> Path:
    """The units and the drop-in as on a first host, with programs where they expect them."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("not checked: systemd is not installed, so nothing here reads its units")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("vllm", "vllm-dsv4", "ray"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    for unit in UNITS:
        text = (SYSTEMD / unit).read_text().replace("/opt/vllm-dsv4/bin/", f"{programs}/")
        (tmp_path / unit).write_text(text)
    drop_ins = tmp_path / f"{UNITS[0]}.d"
    drop_ins.mkdir()
    shutil.copy(SYSTEMD / "ray.conf", drop_ins)
    return tmp_path


def test_systemd_has_nothing_to_say_against_the_units(installed_units: Path) -> None:
    assert verify(installed_units) == ""


def test_systemd_sees_a_misspelt_key(installed_units: Path) -> None:
    unit = installed_units / UNITS[0]
    unit.write_text(unit.read_text().replace("RestartSec=", "RestartSecs="))
    assert "Unknown key 'RestartSecs'" in verify(installed_units)
