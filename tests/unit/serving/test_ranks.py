"""A configuration checks the process that receives it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_distribution import add_distribution
from tests.support.starts import start
from vllm_dsv4.serving.ranks import (
    DISTRIBUTION,
    DriverMark,
    RankMismatch,
    driver_mark,
    installed_version,
    own_variables,
)
from vllm_dsv4.settings import PREFIX, Settings, read_settings

RECEIVE = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"


def this_driver(**variables: str) -> DriverMark:
    return driver_mark(installed_version(), variables)


def receive(cwd: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Unpickle this driver's mark elsewhere, away from the source tree's metadata."""
    kept = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    return start(RECEIVE, kept | env, cwd=cwd, given=pickle.dumps(this_driver()))


def refused(received: subprocess.CompletedProcess[bytes]) -> str:
    """The error's line."""
    assert received.returncode != 0
    return received.stderr.decode().strip().splitlines()[-1]


def test_a_rank_like_the_driver_passes(tmp_path: Path) -> None:
    received = receive(tmp_path)
    assert received.returncode == 0, received.stderr
    assert installed_version().encode() in received.stdout


def test_a_rank_with_another_version_is_named(tmp_path: Path) -> None:
    add_distribution(tmp_path, DISTRIBUTION, "9.9.9")
    message = refused(receive(tmp_path, PYTHONPATH=str(tmp_path)))
    assert f"has vllm-dsv4 9.9.9, the driver has {installed_version()}" in message
    assert "install the same version on every node" in message


def test_a_rank_whose_plugin_is_shut_out_is_named(tmp_path: Path) -> None:
    message = refused(receive(tmp_path, VLLM_PLUGINS=""))
    assert "does not run the vllm-dsv4 plugin, the driver does" in message
    assert "Check VLLM_PLUGINS" in message


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str], dict[str, str]], None]:
    """Unpickle a mark here: ``arriving(drivers, ranks)`` has the variables of both."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)

    def arrive(drivers: dict[str, str], ranks: dict[str, str]) -> None:
        for name in drivers.keys() - ranks.keys():
            # So that what arrives is taken back after the test.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
        pickle.loads(pickle.dumps(this_driver(**drivers)))

    return arrive


@pytest.mark.parametrize(
    ("drivers", "ranks", "told"),
    [
        ({}, {"VLLM_DSV4_SLOTS": "3"}, "VLLM_DSV4_SLOTS=3, the driver has not set it"),
        ({"VLLM_DSV4_SLOTS": "8"}, {"VLLM_DSV4_SLOTS": "3"}, "SLOTS=3, the driver has 8"),
        ({}, {"VLLM_DSV4_RING": "0"}, "VLLM_DSV4_RING=0, the driver has not set it"),
    ],
)
def test_a_rank_with_another_setting_is_named(
    arriving: Callable[..., None], drivers: dict[str, str], ranks: dict[str, str], told: str
) -> None:
    with pytest.raises(RankMismatch) as raised:
        arriving(drivers, ranks)
    assert told in str(raised.value)
    assert f"process {os.getpid()} on host " in str(raised.value)
    (variable,) = ranks
    assert f"unset {variable} on that host" in str(raised.value)


def test_a_rank_with_a_setting_that_cannot_be_read_is_named(arriving: Callable[..., None]) -> None:
    with pytest.raises(RankMismatch, match="unknown environment variable VLLM_DSV4_SLOT='3'"):
        arriving({}, {"VLLM_DSV4_SLOT": "3"})


def test_settings_that_mean_the_same_pass(arriving: Callable[..., None]) -> None:
    interval = "VLLM_DSV4_SNAPSHOT_INTERVAL"
    arriving({interval: "256"}, {interval: "0256", "VLLM_DSV4_RING": "1", "VLLM_DSV4_SLOTS": ""})


def test_a_rank_takes_over_what_only_the_driver_has_set(arriving: Callable[..., None]) -> None:
    arriving({"VLLM_DSV4_SLOTS": "5", "VLLM_DSV4_POISON": "1"}, {"VLLM_DSV4_POISON": "1"})
    assert read_settings() == Settings(slots=5, poison=True)


def test_a_rank_without_the_package_cannot_read_the_configuration() -> None:
    code = f"import sys; sys.modules['vllm_dsv4'] = None; {RECEIVE}"
    received = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(this_driver()),
        capture_output=True,
        check=False,
    )
    assert received.returncode != 0
    assert b"vllm_dsv4" in received.stderr.strip().splitlines()[-1]


def test_the_mark_is_hashed_as_plain_text() -> None:
    assert json.dumps({"mark": DriverMark("1.2.3")}) == '{"mark": "1.2.3"}'


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_mark_survives_being_passed_on(protocol: int) -> None:
    once = pickle.loads(pickle.dumps(this_driver(), protocol))
    assert type(pickle.loads(pickle.dumps(once, protocol))) is DriverMark


def test_a_copy_within_a_process_changes_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DSV4_SLOTS", raising=False)
    sent = this_driver(VLLM_DSV4_SLOTS="5")
    assert copy.deepcopy({"mark": sent}) == {"mark": sent}
    assert "VLLM_DSV4_SLOTS" not in os.environ


def test_what_a_host_checks_or_leaves_empty_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DSV4_CHECK_CHECKPOINT", "0")
    monkeypatch.setenv("VLLM_DSV4_SNAPSHOT_SLOTS", "")
    assert own_variables() == {}
