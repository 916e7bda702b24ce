"""``docs/robustness.md`` names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "robustness.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_named_test_exists() -> None:
    named = NAMED.findall(DOCUMENT.read_text())
    assert len(named) > 60
    missing = [
        f"{path}::{name}" if name else path
        for path, name in named
        if not (ROOT / path).is_file() or (name and name not in functions_of(ROOT / path))
    ]
    assert missing == []


def test_every_row_of_every_table_says_what_holds_it() -> None:
    """A test, or in words why it cannot happen here."""
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    last_cells = [row.rstrip(" |").rsplit(" | ", 1)[-1] for row in rows]
    assert len(rows) > 50
    assert all(NAMED.search(cell) or len(cell.split()) > 1 for cell in last_cells)
