"""Every test here starts several ranks: worker processes of vLLM's, or actors on a Ray node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ray_node import RayNode, ray_node


@pytest.fixture(scope="session")
def model(tiny) -> Path:
    """A small bf16 checkpoint: four heads in two groups, so two ranks share it."""
    return tiny()


@pytest.fixture(scope="module")
def node() -> Iterator[RayNode]:
    """A Ray node with two logical devices."""
    with ray_node(devices=2) as running:
        yield running
