"""Kernels are run by Triton's interpreter, with its small floating types mended."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything else

from collections.abc import Iterator

import pytest

from vllm_dsv4.commands.rehearse.interpreter import mended


@pytest.fixture(autouse=True)
def mended_interpreter() -> Iterator[None]:
    with mended():
        yield
