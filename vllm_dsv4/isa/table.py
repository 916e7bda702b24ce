"""The rows as a table for people."""

from collections.abc import Sequence
from typing import Any

COLUMNS = {
    "owner": "owner",
    "kernel": "kernel",
    "variant": "variant",
    "arch": "arch",
    "vgpr": "VGPR",
    "agpr": "of them AGPR",
    "sgpr": "SGPR",
    "vgpr_spills": "VGPR spills",
    "sgpr_spills": "SGPR spills",
    "scratch_bytes": "scratch",
    "lds_bytes": "LDS",
    "waves_per_simd": "waves/SIMD",
    "mfma": "MFMA",
    "global_load_bytes_widest": "widest load",
    "instructions": "instructions",
}
"""Keys of a row and their headings."""


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, text to the left and numbers to the right."""
    rule = ["---" if key in ("owner", "kernel", "variant", "arch") else "--:" for key in COLUMNS]
    lines = [list(COLUMNS.values()), rule, *([str(row[key]) for key in COLUMNS] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain_table(rows: Sequence[dict[str, Any]]) -> str:
    """Columns of text, for a terminal."""
    lines = [list(COLUMNS.values()), *([str(row[key]) for key in COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
