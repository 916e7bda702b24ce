"""What must be alike for one server's bytes to be another's: the name of a folder of files."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dsv4.offload.files import FORMAT
from vllm_dsv4.ring.plan import ring_geometry, ring_spec_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def describe(vllm_config: VllmConfig, page_bytes: list[int]) -> dict[str, Any]:
    """Everything that the bytes of a page or a snapshot depend on.

    Args:
        page_bytes: of a page on each pipeline stage.
    """
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative else None
    spec = ring_spec_of(vllm_config)
    geometry = ring_geometry(vllm_config)
    return {
        "format": FORMAT,
        "model": model.model,
        "revision": model.revision,
        "weights": weights_digest(model.model),
        "load": [str(vllm_config.load_config.load_format), str(model.quantization)],
        "draft": [draft.model, draft.revision, weights_digest(draft.model)] if draft else None,
        "config": model.hf_config.to_dict() | {"transformers_version": None, "_name_or_path": None},
        "dtype": str(model.dtype),
        "cache_dtype": cache.cache_dtype,
        "fp8": str(current_platform.fp8_dtype()),
        "device": current_platform.device_type,
        "stages": parallel.pipeline_parallel_size,
        "pages": [cache.block_size, page_bytes],
        "rings": [spec.bytes_per_snapshot, geometry.lookahead, geometry.max_model_len < 128]
        + [[kind.value, asdict(geometry.shape(kind))["rows"]] for kind in geometry.layers_of_kind],
        "blocks_ahead": spec.blocks_ahead,
        "hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")],
    }


def digest(description: dict[str, Any]) -> bytes:
    """16 bytes."""
    text = json.dumps(description, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def weights_digest(model: str) -> str:
    """Of the weights' files, from their sizes and samples of each: another training gives another.

    Empty for a model that is named and not a folder; its revision stands for its weights.
    """
    folder = Path(model)
    if not folder.is_dir():
        return ""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES, os.SEEK_SET)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()
