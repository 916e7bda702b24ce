"""Seeded requests in chunks, on the CPU's first model runner."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dsv4.cpu.platform import WORKER
from vllm_dsv4.fixes.seeded_chunks import SeededCpuModelRunner, SeededCpuWorker


def test_vllm_still_needs_it() -> None:
    source = inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "gen.set_offset(gen.get_offset()" in source, "vLLM rewinds another way: remove the fix"
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator().get_offset()


def test_the_platform_names_our_worker() -> None:
    assert resolve_obj_by_qualname(WORKER) is SeededCpuWorker


def test_a_discarded_rows_generator_is_out_of_the_way_while_sampling() -> None:
    runner: Any = SeededCpuModelRunner.__new__(SeededCpuModelRunner)
    first, second = torch.Generator(), torch.Generator()
    runner.input_batch = SimpleNamespace(num_reqs=3, generators={0: first, 2: second})
    mask = np.array([False, True, True, True])
    runner.discard_request_mask = SimpleNamespace(np=mask)
    seen: list[dict[int, Any]] = []
    with patch.object(
        CPUModelRunner,
        "sample_tokens",
        lambda self, grammar: seen.append(dict(self.input_batch.generators)),
    ):
        runner.sample_tokens(None)
    assert seen == [{0: first}]
    assert runner.input_batch.generators == {0: first, 2: second}
