"""The models that can be planned: the released ones by name, any other by its ``config.json``.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dsv4.ring.geometry import (
    HEAD_DIM,
    INDEX_HEAD_DIM,
    ROPE_HEAD_DIM,
    SWA_WINDOW,
    GeometryError,
    has_history,
    layer_ratios,
)


class UnknownModel(ValueError):
    """No such model, or a ``config.json`` that cannot be planned; the message says what can be."""


@dataclass(frozen=True)
class PlannedModel:
    """What the size of a DSV4 model's caches depends on.

    Attributes:
        name: for reports.
        layer_ratios: compression ratio of each layer, draft layers left out.
        draft_layers: window-only layers of the checkpoint's own drafter (MTP).
        max_positions: tokens of the longest context that the model was made for.
        experts: routed experts of a layer; 0 where the config does not say.
        expert_bytes: bytes of all routed experts as they are stored; 0 where that is unknown.
        total_parameters: for reports; empty where the config does not say.
    """

    name: str
    layer_ratios: tuple[int, ...]
    draft_layers: int
    max_positions: int
    experts: int = 0
    expert_bytes: int = 0
    total_parameters: str = ""

    def hf_config(self) -> dict[str, Any]:
        """The entries of ``config.json`` that cache layouts are derived from."""
        return {
            "model_type": "deepseek_v4",
            "num_hidden_layers": len(self.layer_ratios),
            "compress_ratios": [*self.layer_ratios, *[0] * self.draft_layers],
            "num_nextn_predict_layers": self.draft_layers,
            **_DIMENSIONS,
        }


_DIMENSIONS = {
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": ROPE_HEAD_DIM,
    "index_head_dim": INDEX_HEAD_DIM,
    "sliding_window": SWA_WINDOW,
}
"""``config.json`` entries that the cache rows are laid out for."""


FP4_BITS = 4 + 8 / 32
"""Of an expert's weight as released: fp4, and a scale of 8 bits for 32 of them."""
FP8_BITS = 8 + 8 / 128**2
BF16_BITS = 16


def _bytes_of_experts(layers: int, experts: int, hidden: int, width: int, bits: float) -> int:
    """Of three matrices an expert, ``hidden`` x ``width`` each."""
    return int(layers * experts * 3 * hidden * width * bits / 8)


def _alternating(first: tuple[int, int], layers: int) -> tuple[int, ...]:
    """Two leading layers, then C4 and C128 in turn."""
    return (*first, *(4 if n % 2 == 0 else 128 for n in range(layers - 2)))


RELEASED: Mapping[str, PlannedModel] = {
    "flash": PlannedModel(
        "DeepSeek-V4-Flash",
        _alternating((0, 0), 43),
        draft_layers=1,
        max_positions=1_048_576,
        experts=256,
        expert_bytes=_bytes_of_experts(44, 256, 4096, 2048, FP4_BITS),
        total_parameters="284B",
    ),
    "pro": PlannedModel(
        "DeepSeek-V4-Pro",
        _alternating((128, 128), 61),
        draft_layers=1,
        max_positions=1_048_576,
        experts=384,
        expert_bytes=_bytes_of_experts(62, 384, 7168, 3072, FP4_BITS),
        total_parameters="1.6T",
    ),
}
"""The released models: 21 C4 and 20 C128 layers of 43, and 30 and 31 of 61. Layer lists and
experts: the defaults of transformers' ``DeepseekV4Config`` (Flash), the published figures (Pro)."""


def find_model(name: str) -> PlannedModel:
    """A released model by name, else the model of a ``config.json`` or of a folder that has one.

    Raises:
        UnknownModel: naming what was looked for.
    """
    if name in RELEASED:
        return RELEASED[name]
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnknownModel(
            f"MODEL {name!r} is neither {' nor '.join(map(repr, RELEASED))} nor a config.json nor "
            "a folder that holds one. Give one of these."
        )
    try:
        config = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnknownModel(f"MODEL {name!r}: {file} cannot be read as JSON ({error}).") from None
    return _from_config(config, name)


def _from_config(config: Any, name: str) -> PlannedModel:
    if not isinstance(config, dict) or config.get("model_type") != "deepseek_v4":
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise UnknownModel(
            f"MODEL {name!r} has model_type {found!r}; this plans 'deepseek_v4' only. "
            "Give a DeepSeek-V4 config.json, 'flash' or 'pro'."
        )
    for entry, expected in _DIMENSIONS.items():
        if config.get(entry) != expected:
            raise UnknownModel(
                f"MODEL {name!r} has {entry} {config.get(entry)!r}; DeepSeek-V4's caches are laid "
                f"out for {expected}. Check the config.json."
            )
    try:
        ratios = layer_ratios(config)
    except (GeometryError, TypeError, ValueError) as error:
        raise UnknownModel(f"MODEL {name!r}: {error}") from None
    if not has_history(ratios):
        raise UnknownModel(
            f"MODEL {name!r} has compress_ratios {list(ratios)}: no layer compresses, so there is "
            "no paged history to plan. Check the config.json."
        )
    return PlannedModel(
        name,
        ratios,
        draft_layers=_count(config, name, "num_nextn_predict_layers", least=0, default=0),
        max_positions=_count(config, name, "max_position_embeddings", least=1, default=1_048_576),
        experts=_count(config, name, "n_routed_experts", least=1, default=0),
        expert_bytes=_stored_experts(config, name, len(ratios)),
    )


def _stored_experts(config: dict[str, Any], name: str, layers: int) -> int:
    bits = FP8_BITS if config.get("quantization_config") else BF16_BITS
    experts, hidden, width = (
        _count(config, name, side, least=1, default=0)
        for side in ("n_routed_experts", "hidden_size", "moe_intermediate_size")
    )
    drafts = _count(config, name, "num_nextn_predict_layers", least=0, default=0)
    if config.get("expert_dtype") == "fp4":
        bits = FP4_BITS
    return _bytes_of_experts(layers + drafts, experts, hidden, width, bits)


def _count(config: dict[str, Any], name: str, entry: str, least: int, default: int) -> int:
    value = config.get(entry)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UnknownModel(
            f"MODEL {name!r} has {entry} {value!r}, not a whole number of {least} or more. "
            "Check the config.json."
        )
    return value
