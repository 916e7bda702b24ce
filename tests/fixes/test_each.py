"""What holds of every workaround."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vllm_dsv4.fixes

FIXES = sorted(
    path for path in Path(vllm_dsv4.fixes.__path__[0]).glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("fix", FIXES, ids=lambda path: path.stem)
def test_it_says_why_it_is_there_and_when_it_can_go(fix: Path) -> None:
    text = ast.get_docstring(ast.parse(fix.read_text())) or ""
    assert "Reason:" in text
    assert "Remove when" in text


@pytest.mark.parametrize("fix", FIXES, ids=lambda path: path.stem)
def test_it_has_a_test_that_fails_once_it_can_go(fix: Path) -> None:
    text = (Path(__file__).parent / f"test_{fix.stem}.py").read_text()
    assert "def test_vllm_still_needs_it" in text
