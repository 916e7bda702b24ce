"""The shape of a small DeepSeek-V4 model, and its ``config.json`` in the released form."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm_dsv4.checkpoint.errors import BadOption

RATIOS = (0, 4, 128)
"""Compression ratios of a layer: window only, C4 (with an indexer), C128."""

EXPERT_COUNTS = (64, 128, 256, 384)
"""Expert counts that vLLM's CPU routing operator is compiled for."""

HIDDEN_MULTIPLE = 128
"""Side of a block of the released block-fp8 form; every linear's sides are multiples of it."""


class Form(StrEnum):
    """How the weights are written."""

    BF16 = "bf16"
    RELEASED = "released"
    DEQUANTISED = "dequantised"


@dataclass(frozen=True)
class Shape:
    """Sizes of a small model. Those of heads, window and vocabulary are DeepSeek-V4's own.

    Attributes:
        ratios: compression ratio of each layer, one of ``RATIOS``.
        hidden: width of the residual streams.
        experts: routed experts of a layer, one of ``EXPERT_COUNTS``.
        mtp: draft layers (multi-token prediction), 0 or 1.
    """

    ratios: tuple[int, ...] = (0, 0, 4, 128, 4)
    hidden: int = 256
    experts: int = 64
    mtp: int = 0

    vocab: int = 129280
    heads: int = 4
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    index_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512  # the only count that vLLM's CPU top-k operator has
    window: int = 128
    experts_per_token: int = 6
    expert_width: int = 128
    streams: int = 4

    def __post_init__(self) -> None:
        """Raises BadOption, named as on the command line, for a size that cannot work."""
        if not self.ratios:
            raise BadOption("--ratios", "''", "a model needs a layer", "give e.g. 0,0,4,128,4")
        for ratio in self.ratios:
            if ratio not in RATIOS:
                raise BadOption(
                    "--ratios",
                    ",".join(map(str, self.ratios)),
                    f"DeepSeek-V4 has no layer of ratio {ratio}",
                    "use 0 (window only), 4 and 128, one a layer",
                )
        if self.hidden < 256 or self.hidden % HIDDEN_MULTIPLE:
            raise BadOption(
                "--hidden",
                self.hidden,
                f"block-fp8 needs a multiple of {HIDDEN_MULTIPLE}, 256 or more",
                "use e.g. 256 or 512",
            )
        if self.experts not in EXPERT_COUNTS:
            raise BadOption(
                "--experts",
                self.experts,
                "vLLM's CPU routing operator is not compiled for this count",
                f"use one of {', '.join(map(str, EXPERT_COUNTS))}",
            )
        if self.mtp not in (0, 1):
            raise BadOption(
                "--mtp", self.mtp, "DeepSeek-V4 has at most one draft layer", "use 0 or 1"
            )

    @property
    def layers(self) -> int:
        return len(self.ratios)

    @property
    def hash_layers(self) -> int:
        """Leading layers whose experts come from a table of token ids (three as released)."""
        return min(3, self.layers // 2)

    def is_hashed(self, layer: int) -> bool:
        return layer < self.hash_layers


def config_json(shape: Shape, form: Form) -> dict[str, Any]:
    """``config.json`` of a checkpoint of ``shape``, with the released keys.

    The rotary range is 65,536 positions (4,096 stretched 16 times by YaRN): tables of the
    released million positions would dwarf the model.
    """
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        # Without a version before 5, transformers takes the tokenizer for an old Mistral one.
        "transformers_version": "4.57.1",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_hidden_layers": shape.layers,
        # vLLM divides by it where it is 0, before a plugin can say what is wrong.
        **({"num_nextn_predict_layers": shape.mtp} if shape.mtp else {}),
        "compress_ratios": [*shape.ratios, *[0] * shape.mtp],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "q_lora_rank": shape.q_lora_rank,
        "o_lora_rank": shape.o_lora_rank,
        "o_groups": shape.o_groups,
        "sliding_window": shape.window,
        "index_head_dim": shape.index_head_dim,
        "index_n_heads": shape.index_heads,
        "index_topk": shape.index_topk,
        "max_position_embeddings": 65536,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "hc_mult": shape.streams,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_hash_layers": shape.hash_layers,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
    }
    if form is Form.RELEASED:
        config["expert_dtype"] = "fp4"
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    return config


def generation_config_json() -> dict[str, Any]:
    """``generation_config.json``: the tokens that begin and end a text, and plain sampling."""
    return {
        "_from_model_config": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
