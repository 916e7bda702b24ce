"""Every rank must run this plugin, in one version, with one set of settings.

The driver plans rings and lends slots; a rank that lacks the plugin would build vLLM's own model
and read slot numbers as page numbers, one with another version may lay rows out differently, and
one with other settings has rings of another size. vLLM pickles its configuration to every process
that serves it, under every executor. A mark in it checks the process that unpickles it, before
anything is built there.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from vllm_dsv4.serving.live import WrongPlatformError, require_our_platform
from vllm_dsv4.settings import PREFIX, SettingError, Settings, read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DISTRIBUTION = "vllm-dsv4"
MARK = "vllm_dsv4_driver"
"""Key in ``additional_config``."""


class RankMismatch(RuntimeError):
    """A process of the engine has no live plugin, another version of it, or other settings."""


class DriverMark(str):
    """The driver's version of the plugin and its settings. Unpickling it checks that process.

    A string of JSON, since vLLM writes ``additional_config`` as JSON to hash it.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return arrive, (str(self),)

    def __deepcopy__(self, memo: object) -> DriverMark:
        """A copy within a process has not arrived anywhere."""
        return self


def driver_mark(version: str, variables: dict[str, str]) -> DriverMark:
    """Describe a driver.

    Args:
        variables: its ``VLLM_DSV4_`` environment.
    """
    return DriverMark(json.dumps({"version": version, "variables": variables}, sort_keys=True))


def mark(vllm_config: VllmConfig) -> None:
    """Have every process that will receive this configuration checked."""
    vllm_config.additional_config = {
        **(vllm_config.additional_config or {}),
        MARK: driver_mark(installed_version(), own_variables()),
    }


def arrive(text: str) -> DriverMark:
    """Check this process against the driver; take over settings that this process lacks.

    Raises:
        RankMismatch: naming this process, what differs, and the remedy.
    """
    driver = json.loads(text)
    here = f"process {os.getpid()} on host {socket.gethostname()}"
    version = installed_version()
    if version != driver["version"]:
        raise RankMismatch(
            f"{here} has {DISTRIBUTION} {version}, the driver has {driver['version']}: install "
            "the same version on every node."
        )
    try:
        require_our_platform()
    except WrongPlatformError as error:
        raise RankMismatch(
            f"{here} does not run the {DISTRIBUTION} plugin, the driver does: {error}"
        ) from error
    _take_over(driver["variables"], here)
    return DriverMark(text)


def _take_over(variables: dict[str, str], here: str) -> None:
    """Settings of the driver, whether or not the executor copies environments.

    A variable that a host has set by itself wins over vLLM's copy, so it must mean the same.
    """
    try:
        asked = read_settings({**variables, **own_variables()})
    except SettingError as error:
        raise RankMismatch(
            f"{here} cannot read its settings: {error} {_remedy('the variable')}"
        ) from error
    theirs = _by_variable(read_settings(variables))
    for name, value in _by_variable(asked).items():
        if value != theirs[name]:
            raise RankMismatch(
                f"{here} has {name}={os.environ[name]}, the driver has "
                f"{variables.get(name, 'not set it')}: {_remedy(name)}"
            )
    for name, text in variables.items():
        os.environ.setdefault(name, text)


def _remedy(name: str) -> str:
    return (
        f"unset {name} on that host and start its Ray node again; the driver's settings reach "
        "every rank."
    )


def _by_variable(settings: Settings) -> dict[str, object]:
    return {PREFIX + name.upper(): value for name, value in asdict(settings).items()}


def own_variables() -> dict[str, str]:
    """The ``VLLM_DSV4_`` environment of this process, but for what each host may check or not."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIX) and not name.startswith(PREFIX + "CHECK_") and value
    }


@cache
def installed_version() -> str:
    return metadata.version(DISTRIBUTION)
