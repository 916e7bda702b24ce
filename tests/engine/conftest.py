"""Every test here starts real vLLM engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.prompts import VOCABULARY


@pytest.fixture(scope="session")
def model(tiny) -> Path:
    """A small bf16 checkpoint with layers of every kind, for prompts of token ids."""
    return tiny(vocab=VOCABULARY)
