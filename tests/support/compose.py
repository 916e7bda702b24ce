"""Services of the compose file, as commands of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.dockerfile import instructions

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
MODELS = "/models"


def services(variables: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Every service, with variables put in: those given, else their defaults."""
    given = variables or {}
    text = VARIABLE.sub(lambda found: given.get(found[1], found[2] or ""), COMPOSE.read_text())
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def entry_point(service: Mapping[str, Any]) -> list[str]:
    """The service's own, or that of the image that it builds."""
    if "entrypoint" in service:
        return list(service["entrypoint"])
    return image_entry_point(COMPOSE.parent.parent / service["build"]["dockerfile"])


def image_entry_point(dockerfile: Path) -> list[str]:
    """Of the last stage."""
    *_, last = [i.value for i in instructions(dockerfile) if i.keyword == "ENTRYPOINT"]
    found: list[str] = yaml.safe_load(last)
    return found


def command(name: str, models: Path) -> list[str]:
    """What the container of a service runs, with ``models`` in place of its volume of models."""
    service = services()[name]
    words = [*entry_point(service), *service["command"]]
    return [word.replace(f"{MODELS}/", f"{models}/") for word in words]


def health_command(name: str, port: int) -> list[str]:
    """What tells whether the service is healthy, asking another port."""
    how, *words = services()[name]["healthcheck"]["test"]
    assert how == "CMD"
    return [word.replace(":8000/", f":{port}/") for word in words]
