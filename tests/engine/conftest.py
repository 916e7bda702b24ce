"""Every test here starts real vLLM engines."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model(tiny) -> Path:
    """A small bf16 checkpoint with layers of every kind."""
    return tiny()
