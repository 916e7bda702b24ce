"""Whether vLLM keeps Triton under the interpreter, with the plugin and without."""

from __future__ import annotations

import os

from tests.support.starts import start

ASK = """
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.ops.metadata import _token_request_mapping_kernel as kernel
print(HAS_TRITON, type(kernel).__name__)
"""


def kernels_in_a_process(**environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_"))}
    done = start(ASK, {**kept, **environment})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()[-1]


def test_vllm_still_needs_it() -> None:
    alone = kernels_in_a_process(TRITON_INTERPRET="1", VLLM_PLUGINS="")
    assert alone == "False function", "vLLM honours TRITON_INTERPRET by itself: remove the fix"


def test_with_it_the_interpreter_runs_vllms_kernels() -> None:
    assert kernels_in_a_process(TRITON_INTERPRET="1") == "True InterpretedFunction"


def test_it_is_not_there_unless_asked_for() -> None:
    assert kernels_in_a_process() == "False function"
