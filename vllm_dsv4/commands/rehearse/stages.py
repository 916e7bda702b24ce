"""Which stage an engine is in: the methods of vLLM's worker that it passes, with their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_dsv4.commands.rehearse.guards import Guards
from vllm_dsv4.commands.rehearse.result import EngineResult

WORKER_METHODS = {
    "load": "load_model",
    "profile": "determine_available_memory",
    "cache": "initialize_from_config",
    "warmup": "compile_or_warm_up_model",
}
CAPTURE = "capture_model"
"""A method of the runner, called within the warm-up."""


class GuardsBroken(RuntimeError):
    """Something was stored outside the rings and pages."""


class Stages:
    """Notes each stage once it is left, and looks at the guards then."""

    def __init__(self, result: EngineResult, path: Path, guards: Guards) -> None:
        self.result = result
        self.path = path
        self.guards = guards
        self._started = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Raises GuardsBroken where the stage has left the guards other than they were."""
        started = time.monotonic()
        yield
        self.result.seconds[name] = round(time.monotonic() - started, 1)
        self.leave(name)

    def leave(self, name: str) -> None:
        """Raises GuardsBroken; see ``stage``."""
        self.result.broken_guards = self.guards.broken()
        if "generate" not in (name, *self.result.stages):
            self.result.early_snapshots = self.guards.early_snapshots()
        if self.result.broken_guards or self.result.early_snapshots:
            found = self.result.broken_guards or [
                f"a snapshot slot of {ring}" for ring in self.result.early_snapshots
            ]
            raise GuardsBroken(f"written outside its place in stage {name}: {'; '.join(found)}")
        self.result.stages.append(name)
        self.result.write(self.path)

    def watch(self) -> None:
        """Wrap the worker's and the runner's methods.

        Raises:
            UnknownVllm: one of them is gone.
        """
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        from vllm.v1.worker.gpu_worker import Worker

        from vllm_dsv4.commands.rehearse.mends import UnknownVllm

        for name, method in WORKER_METHODS.items():
            if not hasattr(Worker, method):
                raise UnknownVllm(f"the worker has no {method}")
            setattr(Worker, method, self._watched(name, getattr(Worker, method)))
        if not hasattr(GPUModelRunner, CAPTURE):
            raise UnknownVllm(f"the second model runner has no {CAPTURE}")
        setattr(GPUModelRunner, CAPTURE, self._capture(getattr(GPUModelRunner, CAPTURE)))

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def staged(*args: Any, **kwargs: Any) -> Any:
            if name == "warmup":
                return self._warmup(method, *args, **kwargs)
            with self.stage(name):
                return method(*args, **kwargs)

        return staged

    def _warmup(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The warm-up ends where the capture begins, or with the method that holds both."""
        self._started = time.monotonic()
        done = method(*args, **kwargs)
        if "warmup" not in self.result.stages:
            self._warmed_up()
        return done

    def _warmed_up(self) -> None:
        self.result.seconds["warmup"] = round(time.monotonic() - self._started, 1)
        self.leave("warmup")

    def _capture(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def staged(*args: Any, **kwargs: Any) -> Any:
            if "cache" not in self.result.stages:  # the profile captures a graph for its size
                return method(*args, **kwargs)
            self._warmed_up()
            with self.stage("capture"):
                return method(*args, **kwargs)

        return staged
