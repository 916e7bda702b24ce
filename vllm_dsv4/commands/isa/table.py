"""The rows as a table for people."""

from collections.abc import Sequence
from typing import Any

BEGIN = "<!-- made by: vllm-dsv4 isa --write docs/kernels.md -->"
END = "<!-- end of what was made -->"

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


def replace_table(text: str, table: str) -> str:
    """``text`` with what stands between its two marker lines replaced by ``table``."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no lines {BEGIN!r} and {END!r} to put the table between")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def plain_table(rows: Sequence[dict[str, Any]]) -> str:
    """Columns of text, for a terminal."""
    lines = [list(COLUMNS.values()), *([str(row[key]) for key in COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
