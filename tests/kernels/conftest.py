"""Kernels are run by Triton's interpreter, with its small floating types mended."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything else

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.interpreter import mended


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.kernels)


@pytest.fixture(autouse=True)
def mended_interpreter() -> Iterator[None]:
    with mended():
        yield
