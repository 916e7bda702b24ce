"""The ROCm path on CPU tensors: Triton's interpreter, mended, and a card that is only a name."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything else
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rocm.card import pretend_card
from tests.support.interpreter import mended
from tests.support.interpreter_speed import patched_once_a_launch

pretend_card()  # before a test module imports vLLM's ROCm modules


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.kernels)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with mended(), patched_once_a_launch():
        yield
