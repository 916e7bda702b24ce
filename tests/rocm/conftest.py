"""The ROCm path on CPU tensors: Triton's interpreter, mended, and a card that is only a name."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything else
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import Iterator

import pytest

from tests.rocm.card import pretend_card
from vllm_dsv4.commands.rehearse.interpreter import mended
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch

pretend_card()  # before a test module imports vLLM's ROCm modules


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with mended(), patched_once_a_launch():
        yield
