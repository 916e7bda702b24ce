"""Two servers for all tests here: one on rings, one on the paged path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.served import Served
from tests.support.server import server

FLAGS = (
    "--enable-auto-tool-choice", "--tool-call-parser", "deepseek_v4",
    "--reasoning-parser", "deepseek_v4", "--scheduling-policy", "priority",
)  # fmt: skip


@pytest.fixture(scope="session")
def both(
    tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Served]]:
    """On rings, and on the paged path; started side by side."""
    folders = [tmp_path_factory.mktemp(name) for name in ("rings", "paged")]
    with (
        server("serve.sh", tiny(), folders[0], {"VLLM_DSV4_RING": "1"}, FLAGS) as rings,
        server("serve.sh", tiny(), folders[1], {"VLLM_DSV4_RING": "0"}, FLAGS) as paged,
    ):
        rings.wait_until_ready()
        paged.wait_until_ready()
        yield Served(rings), Served(paged)
        assert rings.stop() == 0
        assert "EngineDeadError" not in rings.log
