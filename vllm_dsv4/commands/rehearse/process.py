"""One engine on the stand-in: ``python -m vllm_dsv4.commands.rehearse.process REQUEST RESULT``.

A process of its own: what makes it look like one with a card cannot be taken back.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dsv4.commands.rehearse.result import EngineResult

if TYPE_CHECKING:
    from vllm_dsv4.commands.rehearse.stages import Stages

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Request:
    """What an engine is asked to do.

    Attributes:
        arch: of the card that is stood in for; None serves on the plugin's CPU path.
        options: arguments of ``LLM``; what is not named is as ``vllm serve`` has it.
        scenes: names of ``scenes.SCENES`` to play, in order.
        score: results of engines whose answers are to be scored, its own included. Another's may
            still be under way.
        score_up_to: tokens of the longest text that is scored; None scores all.
    """

    model: str
    arch: str | None
    options: dict[str, Any]
    scenes: list[str]
    score: list[str] = field(default_factory=list)
    score_up_to: int | None = None


def rehearse(request: Request, path: Path) -> None:
    """Start, play, take down. Raises whatever goes wrong, after ``path`` tells how far it came."""
    result = EngineResult()
    result.write(path)
    if request.arch is None:
        from vllm_dsv4.commands.rehearse.guards import Guards
        from vllm_dsv4.commands.rehearse.stages import Stages

        _serve(request, Stages(result, path, Guards()))
        return
    with ExitStack() as interpreter:
        _stand_in(request.arch, interpreter)
        stages = _mend_vllm(request, result, path)
        try:
            _serve(request, stages)
        finally:
            from vllm_dsv4.commands.rehearse.graph import TAPES

            result.host_reads = TAPES.host_reads
            result.graphs = (TAPES.captured, TAPES.replayed)
            result.write(path)


def _mend_vllm(request: Request, result: EngineResult, path: Path) -> Stages:
    """Everything that must be in place before an engine starts."""
    from vllm_dsv4.commands.rehearse import graph, mends, operators, pools
    from vllm_dsv4.commands.rehearse.guards import Guards
    from vllm_dsv4.commands.rehearse.stages import Stages

    entered = graph.remember_operators()
    mends.mend_platform()
    mends.mend_inspection()
    operators.install()
    mends.mend_slow_kernels()
    mends.mend_launchers()
    mends.mend_worker()
    mends.mend_warmups()
    if not request.options.get("enforce_eager"):
        graph.install(entered)
    if request.options.get("enable_sleep_mode"):
        pools.install()
        mends.mend_sleep()
    guards = Guards()
    guards.install()
    stages = Stages(result, path, guards)
    stages.watch()
    return stages


def _stand_in(arch: str, interpreter: ExitStack) -> None:
    """Everything that must be in place before vLLM is imported."""
    import torch._dynamo
    import torch._inductor.utils  # noqa: F401  # before torch.compile is replaced

    from vllm_dsv4.commands.rehearse import card, library, signs
    from vllm_dsv4.commands.rehearse.interpreter import boolean_masks, mended
    from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch
    from vllm_dsv4.fixes import triton_interpreter

    signs.install(arch)
    card.install(arch)
    library.install()
    triton_interpreter.install()
    for mend in (mended, boolean_masks, patched_once_a_launch):
        interpreter.enter_context(mend())


def _serve(request: Request, stages: Stages) -> None:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from vllm_dsv4.commands.rehearse.scenes import Stage, play, score_all

    result = stages.result
    llm = LLM(model=request.model, **request.options)
    result.facts = _facts(llm)
    stage = Stage(llm, result)
    with stages.stage("generate"):
        play(request.scenes, stage)
        stage.result.write(stages.path)
        score_all(map(Path, request.score), stage, request.score_up_to)
    with stages.stage("shutdown"):
        llm.llm_engine.engine_core.shutdown()
        del llm, stage
        gc.collect()
        cleanup_dist_env_and_memory()


def _facts(llm: Any) -> dict[str, Any]:
    """What was decided at start-up."""
    from vllm.platforms import current_platform

    config = llm.llm_engine.vllm_config
    worker = llm.llm_engine.model_executor.driver_worker.worker
    return {
        "platform": type(current_platform).__name__,
        "runner": f"{type(worker.model_runner).__module__}.{type(worker.model_runner).__name__}",
        "model": type(worker.model_runner.model).__module__,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "captures": not config.model_config.enforce_eager,
        "capture_sizes": list(config.compilation_config.cudagraph_capture_sizes or []),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
    }


def main(request: Path, result: Path) -> int:
    os.environ.update(ENVIRONMENT)
    asked = Request(**json.loads(request.read_text()))
    if asked.arch is not None:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    try:
        rehearse(asked, result)
    except Exception as error:
        from vllm_dsv4.commands.rehearse.causes import one_line

        told = EngineResult.read(result)
        told.error = one_line(error)
        told.write(result)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
