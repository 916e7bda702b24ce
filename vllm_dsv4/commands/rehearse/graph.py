"""A CUDA graph on CPU tensors: a tape of operators and Triton launches, run again on replay.

The tape keeps the very tensors that were captured, and what Python computed from them is frozen:
an address that changed, or a number that was read on the host, shows in what a replay computes.
A read on the host while capturing, which a card would refuse, is noted as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_dsv4.commands.rehearse.card import POOL

HOST_READS = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal")
)
"""Operators whose result, or its shape, the host must wait for."""
HOST_METHODS = ("tolist", "numpy")
"""Methods of a CPU tensor that read it without an operator."""


@dataclass
class Tapes:
    """What all graphs of a process recorded.

    Attributes:
        open: the tape of the graph that is being captured.
        host_reads: where the host read a value meanwhile, each place once.
    """

    open: list[tuple[Any, ...]] | None = None
    captured: int = 0
    replayed: int = 0
    host_reads: list[str] = field(default_factory=list)

    def note_read(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if not _is_ours(f.filename)]
        place = " < ".join(f"{_short(f.filename)}:{f.lineno}" for f in frames[-1:-4:-1])
        text = f"{what} at {place}"
        if text not in self.host_reads:
            self.host_reads.append(text)


TAPES = Tapes()


def _is_ours(filename: str) -> bool:
    return "/torch/" in filename or filename == __file__


def _short(filename: str) -> str:
    return filename.split("site-packages/")[-1]


class _Recorder(TorchDispatchMode):
    """Runs every operator, and writes it to the open tape.

    Args:
        entered: Python of operators that are recorded as what they call.
    """

    def __init__(self, entered: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.entered = entered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if TAPES.open is None:
            return func(*args, **kwargs)
        name = func._schema.name
        if name in HOST_READS:
            TAPES.note_read(name)
        if name in self.entered:
            with self:
                return self.entered[name](*args, **kwargs)
        out = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        TAPES.open.append((func, args, kwargs, tensors))
        return out


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tape: list[tuple[Any, ...]] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        assert TAPES.open is None, "a graph is captured within another"
        TAPES.open = self.tape

    def capture_end(self) -> None:
        TAPES.open = None
        TAPES.captured += 1

    def reset(self) -> None:
        self.tape = []

    def pool(self) -> tuple[int, int]:
        return POOL

    def replay(self) -> None:
        """Run the tape; results that lie elsewhere this time are put where they lay at capture."""
        assert TAPES.open is None, "a graph is replayed while another is captured"
        TAPES.replayed += 1
        for run, args, kwargs, captured in self.tape:
            out = run(*args, **kwargs)
            fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            for before, now in zip(captured, fresh, strict=True):
                if before.data_ptr() != now.data_ptr():
                    before.copy_(now)


@contextmanager
def _capturing(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def remember_operators() -> dict[str, Callable[..., Any]]:
    """Python of the operators that vLLM registers, filled as it does. Before vLLM's models."""
    import vllm.utils.torch_utils as torch_utils

    entered: dict[str, Callable[..., Any]] = {}
    register = torch_utils.direct_register_custom_op

    def remembering(op_name: str, op_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        entered[f"vllm::{op_name}"] = op_func
        return register(op_name, op_func, *args, **kwargs)

    torch_utils.direct_register_custom_op = remembering
    return entered


def install(entered: dict[str, Callable[..., Any]]) -> None:
    """Replace PyTorch's graphs; from here on every operator passes the recorder."""
    from triton.runtime import interpreter

    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = _capturing
    torch.cuda.is_current_stream_capturing = lambda: TAPES.open is not None
    for name in HOST_METHODS:
        setattr(torch.Tensor, name, _noting(name, getattr(torch.Tensor, name)))
    run = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        """A launch is one entry: what the interpreter does to run it is not the graph's."""
        tape, TAPES.open = TAPES.open, None
        try:
            run(executor, *args, **kwargs)
        finally:
            TAPES.open = tape
        if tape is not None:
            tape.append((run, (executor, *args), kwargs, []))

    interpreter.GridExecutor.__call__ = launch
    _Recorder(entered).__enter__()


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if TAPES.open is not None:
            TAPES.note_read(f"Tensor.{name}")
        return method(tensor, *args, **kwargs)

    return noted
