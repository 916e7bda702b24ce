"""A checkpoint's tensors held against its ``config.json`` while they stream into a model.

vLLM 0.32 starts with the memory's former content where a tensor of a linear layer or of an expert
is missing (``track_weights_loading`` leaves out every module that has a quantisation method, and
knows fused parameters only as a whole), takes the first rows of a tensor that has too many, and
names neither tensor nor file in most of its errors. Every rank of a model reads every name, so each
can check the whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dsv4.checkpoint.expected import ASKING, scale_names
from vllm_dsv4.checkpoint.files import damaged_files
from vllm_dsv4.checkpoint.names import Kind, Quant, Spec
from vllm_dsv4.checkpoint.quantise import BLOCK, GROUP

PACKED = (torch.int8, torch.uint8)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, *PACKED)
SCALE = ".scale"
SCALES = ("weight_scale", "weight_scale_inv")
"""Ends of the names of vLLM's parameters for scales."""
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""No fault of the checkpoint: vLLM has advice of its own."""
SHOWN = 5
REMEDY = (
    "Fetch the checkpoint again, or give it the config.json that it was saved with. If it is as "
    "it should be, VLLM_DSV4_CHECK_CHECKPOINT=0 loads it without this check."
)


class CheckpointError(ValueError):
    """A checkpoint that does not hold what its ``config.json`` asks for; the message names the
    tensors or files, and the remedy."""


def remedy(overrides: Mapping[str, object]) -> str:
    """What to do about it: first of all take back what ``--hf-overrides`` asks for instead."""
    asking = {name: value for name, value in overrides.items() if name in ASKING}
    if not asking:
        return REMEDY
    changed = ", ".join(f"{name}={value!r}" for name, value in asking.items())
    return (
        f"--hf-overrides asks for {changed}, which changes what the checkpoint must hold. "
        "Remove that override: a checkpoint is served as it was saved."
    )


class CheckedWeights:
    """The tensors of a checkpoint, each checked as it passes.

    To be iterated over once. ``check_complete`` tells what never came, and ``explain`` what
    stopped whoever loads them.

    Args:
        weights: names as they are stored, and tensors.
        expected: by name, what must come.
        quantisation: ``quantization_config`` of ``config.json``, or None.
        where: the checkpoint's folder or name.
        overrides: entries of ``config.json`` that the user changed (``--hf-overrides``).
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        expected: Mapping[str, Spec],
        quantisation: Mapping[str, Any] | None,
        where: str,
        overrides: Mapping[str, object] | None = None,
    ) -> None:
        self._weights = iter(weights)
        self._expected = expected
        self._quantised = quantisation is not None
        self._block = (quantisation or {}).get("weight_block_size") or (BLOCK, BLOCK)
        self._where = where
        self._remedy = remedy(overrides or {})
        self._seen: set[str] = set()
        self._need_scales: list[Spec] = []
        self._formats: dict[str, torch.dtype] = {}
        self._scale_shapes: dict[str, tuple[int, ...]] = {}
        self._passing = ""
        self._ended = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            try:
                name, tensor = next(self._weights)
            except StopIteration:
                self._ended = True
                return
            except OUT_OF_MEMORY:
                raise
            except Exception as error:
                raise self._unreadable(error) from error
            self._check(name, tensor)
            self._seen.add(name)
            self._passing = f"{name} ({tensor.dtype}, {list(tensor.shape)})"
            yield name, tensor

    def check_complete(self) -> None:
        """Everything must have come.

        Raises:
            CheckpointError: naming the first tensors that did not, and files that are damaged.
        """
        missing = [name for name, spec in self._expected.items() if self._lacks(spec)]
        missing += [
            scale_names(spec)[0]
            for spec in self._need_scales
            if self._seen.isdisjoint(scale_names(spec))
        ]
        if missing:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise self._refused(f"missing: {', '.join(missing[:SHOWN])}{more}")

    def check_scaled(self, parameters: Iterable[str], loaded: set[str]) -> None:
        """Layers built for quantised weights must have got scales: given a bf16 weight alone they
        would cast it, and multiply by what the memory held.

        Raises:
            CheckpointError: naming the first parameters that got none.
        """
        bare = [name for name in parameters if name.endswith(SCALES) and name not in loaded]
        if bare:
            raise self._refused(
                "config.json declares a quantisation that the tensors do not have: "
                f"no scales for {', '.join(bare[:SHOWN])}"
            )

    def explain(self, error: Exception) -> CheckpointError:
        """``error``, which ended a load, with what it lacks: the tensor that was being loaded, or
        those that never came."""
        if not self._ended:
            what = f"tensor {self._passing} cannot be loaded"
            return self._refused(f"{what}: {type(error).__name__}: {error}")
        try:
            self.check_complete()
        except CheckpointError as incomplete:
            return incomplete
        return self._refused(f"loading failed: {type(error).__name__}: {error}")

    def _lacks(self, spec: Spec) -> bool:
        return spec.name not in self._seen and spec.copy_of is None

    def _check(self, name: str, tensor: Tensor) -> None:
        spec = self._expected.get(name)
        if spec is None:
            self._check_scale(name, tensor)
            return
        shape = spec.shape
        if tensor.dtype in QUANTISED and spec.kind is not Kind.EXPERT_TABLE:
            self._check_declared(name, tensor)
            if spec.quant is Quant.NONE:
                raise self._refused(f"tensor {name} is {tensor.dtype}, and vLLM does not scale it")
            self._need_scales.append(spec)
            self._check_pair(spec, tensor.dtype)
        elif tensor.is_floating_point() is (spec.kind is Kind.EXPERT_TABLE):
            kind = "whole numbers" if spec.kind is Kind.EXPERT_TABLE else "fractions"
            raise self._refused(f"tensor {name} is {tensor.dtype}, and must hold {kind}")
        if tensor.dtype in PACKED and spec.kind is not Kind.EXPERT_TABLE:
            shape = (*shape[:-1], shape[-1] // 2)
        self._check_shape(name, tuple(tensor.shape), shape)

    def _check_scale(self, name: str, tensor: Tensor) -> None:
        """Its shape follows from the weight's format: checked when both have come."""
        spec = self._expected.get(name.removesuffix(SCALE) + ".weight")
        if spec is None or not name.endswith(SCALE):
            return
        self._check_declared(name, tensor)
        self._scale_shapes[spec.name] = tuple(tensor.shape)
        if spec.name in self._formats:
            self._check_pair(spec, self._formats[spec.name])

    def _check_pair(self, spec: Spec, dtype: torch.dtype) -> None:
        self._formats[spec.name] = dtype
        found = self._scale_shapes.get(spec.name)
        if found is not None:
            rows, columns = spec.shape
            height, width = (1, GROUP) if dtype in PACKED else self._block
            wanted = (-(-rows // height), -(-columns // width))
            self._check_shape(spec.name.removesuffix(".weight") + SCALE, found, wanted)

    def _check_declared(self, name: str, tensor: Tensor) -> None:
        if not self._quantised:
            raise self._refused(
                f"tensor {name} is {tensor.dtype}, and config.json has no quantization_config"
            )

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise self._refused(
                f"tensor {name} has shape {list(found)}, and config.json makes it {list(wanted)}"
            )

    def _unreadable(self, error: Exception) -> CheckpointError:
        after = f"after tensor {self._passing}" if self._passing else "at its first tensor"
        return self._refused(f"reading stopped {after}: {type(error).__name__}: {error}")

    def _refused(self, what: str) -> CheckpointError:
        damaged = damaged_files(Path(self._where))
        files = f" Damaged files: {'; '.join(damaged[:SHOWN])}." if damaged else ""
        return CheckpointError(f"checkpoint {self._where}: {what}.{files} {self._remedy}")
