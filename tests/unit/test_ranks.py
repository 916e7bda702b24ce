"""A configuration checks the process that receives it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_distribution import add_distribution
from vllm_dsv4.ranks import DISTRIBUTION, DriverVersion, installed_version

RECEIVE = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"


def receive(version: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Unpickle the mark of a driver in another process, away from the source tree's metadata."""
    return subprocess.run(
        [sys.executable, "-c", RECEIVE],
        input=pickle.dumps(DriverVersion(version)),
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"} | env,
        capture_output=True,
        check=False,
    )


def test_a_rank_like_the_driver_passes(tmp_path: Path) -> None:
    received = receive(installed_version(), tmp_path)
    assert received.returncode == 0, received.stderr
    assert installed_version().encode() in received.stdout


def test_a_rank_with_another_version_is_named(tmp_path: Path) -> None:
    add_distribution(tmp_path, DISTRIBUTION, "9.9.9")
    received = receive(installed_version(), tmp_path, PYTHONPATH=str(tmp_path))
    assert received.returncode != 0
    message = received.stderr.decode().strip().splitlines()[-1]
    assert f"has vllm-dsv4 9.9.9, the driver has {installed_version()}" in message
    assert "install the same version on every node" in message


def test_a_rank_whose_plugin_is_shut_out_is_named(tmp_path: Path) -> None:
    received = receive(installed_version(), tmp_path, VLLM_PLUGINS="")
    assert received.returncode != 0
    message = received.stderr.decode().strip().splitlines()[-1]
    assert "does not run the vllm-dsv4 plugin, the driver does" in message
    assert "Check VLLM_PLUGINS" in message


def test_a_rank_without_the_package_cannot_read_the_configuration() -> None:
    code = f"import sys; sys.modules['vllm_dsv4'] = None; {RECEIVE}"
    received = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(DriverVersion(installed_version())),
        capture_output=True,
        check=False,
    )
    assert received.returncode != 0
    assert b"vllm_dsv4" in received.stderr.strip().splitlines()[-1]


def test_the_mark_is_hashed_as_plain_text() -> None:
    assert json.dumps({"mark": DriverVersion("1.2.3")}) == '{"mark": "1.2.3"}'


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_mark_survives_being_passed_on(protocol: int) -> None:
    once = pickle.loads(pickle.dumps(DriverVersion(installed_version()), protocol))
    assert type(pickle.loads(pickle.dumps(once, protocol))) is DriverVersion
