"""vLLM 0.32's first model runner kills the CPU engine on a seeded request whose prompt is chunked.

Reason: ``GPUModelRunner._bookkeeping_sync`` takes back what a discarded token drew from the
request's generator with ``Generator.set_offset``, which torch has for accelerators only. vLLM's CPU
platform switches chunked prefill off for DSV4, so that the paged path never comes there.
Remove when vLLM no longer rewinds by offset, or torch's CPU generators have one; a test fails then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput


class SeededCpuModelRunner(CPUModelRunner):
    """The first runner, which leaves a request's generator alone while its token is discarded.

    Never constructed: ``SeededCpuWorker`` gives this class to the runner that vLLM has built.
    """

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Rows whose token is discarded draw from the common generator: nothing to take back."""
        generators = self.input_batch.generators
        if not generators:
            return super().sample_tokens(grammar_output)
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        held = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(held)


class SeededCpuWorker(CPUWorker):
    """vLLM's CPU worker, its first model runner mended. The second has no such generators."""

    def init_device(self) -> None:
        super().init_device()
        if type(self.model_runner) is CPUModelRunner:
            self.model_runner.__class__ = SeededCpuModelRunner
