"""The ring group's block-table row: how a slot and its snapshot orders reach every worker.

vLLM carries block ids to all ranks, so a row of small numbers needs no channel of its own:

    column 0        slot of the request
    column 1        snapshot slot to restore from, 0 for none
    column 2        paged blocks that the prefix-cache hit covers
    column 2 + b    snapshot slot to fill at boundary ``b`` (after ``b`` paged blocks), 0 for none

Rows only grow while a request runs, so a later order is appended with zeros up to its column.
"""

from __future__ import annotations

SLOT = 0
SOURCE = 1
HIT_BLOCKS = 2
HEAD = 3
"""Columns before the first boundary's."""


def target_column(boundary: int) -> int:
    """Column of the snapshot taken after ``boundary`` paged blocks (1 or more)."""
    return HEAD + boundary - 1


def row_columns(max_model_len: int, block_size: int) -> int:
    """Columns of a row: the head, and one for every block boundary a sequence can reach."""
    return HEAD + -(-max_model_len // block_size)
