"""Every rank must run this plugin, in one version: a check that travels with the configuration.

The driver plans rings and lends slots; a rank that lacks the plugin would build vLLM's own model
and read slot numbers as page numbers, and one with another version may lay rows out differently.
vLLM pickles its configuration to every process that serves it, under every executor. A mark in it
checks the process that unpickles it, before anything is built there.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DISTRIBUTION = "vllm-dsv4"
MARK = "vllm_dsv4_version"
"""Key in ``additional_config``."""


class RankMismatch(RuntimeError):
    """A process of the engine has no live plugin, or another version of it."""


class DriverVersion(str):
    """The driver's version of the plugin. Unpickling it checks the process that does so.

    A string, since vLLM writes ``additional_config`` as JSON to hash it.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return arrive, (str(self),)


def mark(vllm_config: VllmConfig) -> None:
    """Have every process that will receive this configuration checked."""
    vllm_config.additional_config = {
        **(vllm_config.additional_config or {}),
        MARK: DriverVersion(installed_version()),
    }


def arrive(driver_version: str) -> DriverVersion:
    """Check this process against the driver.

    Raises:
        RankMismatch: naming this process, what differs, and the remedy.
    """
    here = f"process {os.getpid()} on host {socket.gethostname()}"
    version = installed_version()
    if version != driver_version:
        raise RankMismatch(
            f"{here} has {DISTRIBUTION} {version}, the driver has {driver_version}: install the "
            "same version on every node."
        )
    from vllm_dsv4.models.common import WrongPlatformError, require_our_platform

    try:
        require_our_platform()
    except WrongPlatformError as error:
        raise RankMismatch(
            f"{here} does not run the {DISTRIBUTION} plugin, the driver does: {error}"
        ) from error
    return DriverVersion(driver_version)


@cache
def installed_version() -> str:
    return metadata.version(DISTRIBUTION)
