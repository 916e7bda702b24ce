"""Every test here is a long randomised run through real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session")
def model(tiny) -> Path:
    """Three layers, both compressors among them; every layer has a window."""
    return tiny(ratios=(4, 4, 128))
