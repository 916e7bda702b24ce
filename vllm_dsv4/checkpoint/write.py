"""Writes a checkpoint: config, tokenizer, and safetensors files with their index."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from vllm_dsv4.checkpoint import tokenizer
from vllm_dsv4.checkpoint.config import Form, Shape, config_json, generation_config_json
from vllm_dsv4.checkpoint.dequantise import dequantise
from vllm_dsv4.checkpoint.errors import BadOption
from vllm_dsv4.checkpoint.names import Quant, Spec, tensors
from vllm_dsv4.checkpoint.quantise import block_fp8, fp4
from vllm_dsv4.checkpoint.weights import values

SHARD_BYTES = 64 * 2**20
"""Bytes of bf16 weights in one file, or one tensor where that is larger; also what is held in
memory at a time."""


def make_tiny(
    out: Path,
    shape: Shape | None = None,
    *,
    seed: int = 0,
    form: Form = Form.BF16,
    progress: Callable[[int], object] = lambda _bytes: None,
) -> int:
    """Write a random checkpoint into the folder ``out``, and return its weights' bytes.

    The same arguments give the same bytes. ``progress`` is called with the bf16 bytes of each
    tensor as it is done, ``weight_bytes(shape)`` in all.

    Raises:
        BadOption: ``out`` exists and is not an empty folder.
        TokenizerMissing: see ``tokenizer.files``.
    """
    shape = shape or Shape()
    check_empty(out)
    tokenizer_files = tokenizer.files()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files.items():
        (out / name).write_bytes(content)
    _write_json(out / "config.json", config_json(shape, form))
    _write_json(out / "generation_config.json", generation_config_json())
    return _write_weights(out, shape, seed, form, progress)


def check_empty(out: Path) -> None:
    """Raise BadOption unless ``out`` is an empty folder or nothing at all."""
    if out.exists() and not out.is_dir():
        raise BadOption("OUT", out, "is a file", "give the path of a new or empty folder")
    if out.is_dir() and any(out.iterdir()):
        raise BadOption("OUT", out, "is not empty", "give a new folder, or empty this one")


def weight_bytes(shape: Shape) -> int:
    """Bytes of all weights of ``shape`` in bf16 form."""
    return sum(spec.bytes for spec in tensors(shape))


def _write_weights(
    out: Path, shape: Shape, seed: int, form: Form, progress: Callable[[int], object]
) -> int:
    shards = list(_shards(shape))
    where: dict[str, str] = {}
    total = 0
    for number, specs in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content: dict[str, Tensor] = {}
        for spec in specs:
            content.update(_stored(spec, values(spec, seed, shape.experts), form))
            progress(spec.bytes)
        (out / name).write_bytes(save(content, metadata={"format": "pt"}))
        where.update(dict.fromkeys(content, name))
        total += sum(tensor.nbytes for tensor in content.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    _write_json(out / "model.safetensors.index.json", index)
    return total


def _stored(spec: Spec, value: Tensor, form: Form) -> dict[str, Tensor]:
    """The tensors, by name, that stand for ``spec`` in a file of ``form``."""
    if form is Form.BF16 or spec.quant is Quant.NONE:
        return {spec.name: value}
    weight, scale = block_fp8(value) if spec.quant is Quant.BLOCK_FP8 else fp4(value)
    if form is Form.DEQUANTISED:
        return {spec.name: dequantise(weight, scale)}
    return {spec.name: weight, spec.name.removesuffix("weight") + "scale": scale}


def _shards(shape: Shape) -> Iterator[list[Spec]]:
    """The tensors in order, cut into files of at most ``SHARD_BYTES`` or one tensor."""
    shard: list[Spec] = []
    size = 0
    for spec in tensors(shape):
        if shard and size + spec.bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(spec)
        size += spec.bytes
    yield shard


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
