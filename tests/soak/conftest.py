"""Every test here is a long randomised run through real engines."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tiny) -> Path:
    """Three layers, both compressors among them; every layer has a window."""
    return tiny(ratios=(4, 4, 128))
