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
        total_parameters: for reports; empty where the config does not say.
    """

    name: str
    layer_ratios: tuple[int, ...]
    draft_layers: int
    max_positions: int
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


def _alternating(first: tuple[int, int], layers: int) -> tuple[int, ...]:
    """Two leading layers, then C4 and C128 in turn."""
    return (*first, *(4 if n % 2 == 0 else 128 for n in range(layers - 2)))


RELEASED: Mapping[str, PlannedModel] = {
    "flash": PlannedModel("DeepSeek-V4-Flash", _alternating((0, 0), 43), 1, 1_048_576, "284B"),
    "pro": PlannedModel("DeepSeek-V4-Pro", _alternating((128, 128), 61), 1, 1_048_576, "1.6T"),
}
"""The released models: 21 C4 and 20 C128 layers of 43, and 30 and 31 of 61. Layer lists: the
defaults of transformers' ``DeepseekV4Config`` (Flash) and the published layer counts (Pro)."""


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
    )


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
