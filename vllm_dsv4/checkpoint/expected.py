"""The tensors that a served model's ``config.json`` asks of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_dsv4.checkpoint.config import Shape
from vllm_dsv4.checkpoint.names import Quant, Spec, tensors

SIZES: Mapping[str, str] = {
    "hidden": "hidden_size",
    "experts": "n_routed_experts",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "index_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "streams": "hc_mult",
}
"""Entry of ``config.json`` that holds each size of ``Shape`` on which a tensor's shape depends."""

ASKING = {
    *SIZES.values(),
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "num_hash_layers",
    "mlp_layer_types",
    "compress_ratios",
    "n_shared_experts",
    "topk_method",
    "quantization_config",
}
"""Entries of ``config.json`` that say which tensors a checkpoint holds, and how large."""


@dataclass(frozen=True)
class ServedShape(Shape):
    """Sizes of a model that somebody else made: any that vLLM can build."""

    hashed: frozenset[int] = field(default=frozenset())

    def __post_init__(self) -> None:
        """No limits of small models here: vLLM and the refusals have their own."""

    def is_hashed(self, layer: int) -> bool:
        return layer in self.hashed


def served_shape(hf_config: Any, ratios: tuple[int, ...]) -> ServedShape:
    """The shape that a Hugging Face configuration describes.

    Args:
        ratios: compression ratio of every layer, draft layers left out.
    """
    kinds = getattr(hf_config, "mlp_layer_types", None)
    if kinds is None:
        kinds = ["hash_moe"] * hf_config.num_hash_layers
    # else Transformers' form of the same, which vLLM 0.33 reads
    return ServedShape(
        ratios=ratios,
        mtp=getattr(hf_config, "num_nextn_predict_layers", None) or 0,
        hashed=frozenset(layer for layer, kind in enumerate(kinds) if kind == "hash_moe"),
        **{ours: getattr(hf_config, entry) for ours, entry in SIZES.items()},
    )


def expected_tensors(
    hf_config: Any, ratios: tuple[int, ...], drafts: bool = False
) -> dict[str, Spec]:
    """By name, what the checkpoint must hold; what it may hold besides is for vLLM to say.

    Args:
        drafts: of the draft layers, which a model of their own loads; else of all other layers.
    """
    specs = (
        spec
        for spec in tensors(served_shape(hf_config, ratios))
        if spec.name.startswith("mtp.") is drafts
    )
    left_out: list[str] = []
    if getattr(hf_config, "topk_method", None) != "noaux_tc":
        left_out.append(".ffn.gate.bias")
    if getattr(hf_config, "n_shared_experts", None) != 1:
        left_out.append(".shared_experts.")
    return {spec.name: spec for spec in specs if not any(part in spec.name for part in left_out)}


def scale_names(spec: Spec) -> tuple[str, ...]:
    """Under which name, of several in use, the scales of a quantised ``spec`` may be stored."""
    if spec.quant is Quant.NONE:
        return ()
    module = spec.name.removesuffix(".weight")
    return tuple(f"{module}.{name}" for name in ("scale", "weight_scale", "weight_scale_inv"))
