"""Every test here starts real vLLM engines."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tiny) -> Path:
    """A small bf16 checkpoint with layers of every kind."""
    return tiny()
