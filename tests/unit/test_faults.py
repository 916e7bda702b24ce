"""The table of deliberate faults fits the source, and the document shows it. ``make faults``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.__main__ import FAULTS
from tests.faults.fault import ROOT, Fault, as_markdown


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.words)
def test_a_fault_can_be_put_into_the_source(fault: Fault, tmp_path: Path) -> None:
    for name, _, _ in fault.changes:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    fault.apply(tmp_path)
    path, _, name = fault.killed_by.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_the_document_shows_the_table() -> None:
    assert as_markdown(FAULTS) in (ROOT / "docs" / "robustness.md").read_text(), (
        "python -m tests.faults --markdown prints it"
    )
