"""DSV4's draft (MTP) model on the CPU build of vLLM, its window in a ring of its own.

vLLM 0.32 brings draft models for its accelerators only. The layer below follows theirs
(``vllm/models/deepseek_v4/xpu/mtp.py``), with the CPU decoder layer inside and PyTorch in place of
two fused kernels; names and loading of the weights are theirs.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mhc import HCHeadOp
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.deepseek_mtp import SharedHead
from vllm.model_executor.models.utils import maybe_prefix
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.models.deepseek_v4.cpu.model import DeepseekV4DecoderLayer
from vllm.models.deepseek_v4.xpu.mtp import DeepSeekV4MTP as VllmDeepSeekV4MTP

from vllm_dsv4.cpu.model import put_model_on_rings
from vllm_dsv4.cpu.portable.products import prepare
from vllm_dsv4.cpu.released import LoadsReleasedForm, bf16_config, must_dequantise
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.serving.live import require_our_platform
from vllm_dsv4.serving.model import LoadsWholeCheckpoint


class DraftLayer(nn.Module):
    """One draft layer: the next token's embedding and the target's streams, through one block."""

    def __init__(self, vllm_config: VllmConfig, topk_indices: torch.Tensor, prefix: str) -> None:
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        quant_config = vllm_config.quant_config
        size, self.hc_mult = config.hidden_size, config.hc_mult
        self.hidden_size, self.rms_norm_eps, self.hc_eps = size, config.rms_norm_eps, config.hc_eps
        self.enorm = RMSNorm(size, eps=config.rms_norm_eps)
        self.hnorm = RMSNorm(size, eps=config.rms_norm_eps)
        self.e_proj, self.h_proj = (
            ReplicatedLinear(
                size,
                size,
                bias=False,
                return_bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
            )
            for name in ("e_proj", "h_proj")
        )
        streams = self.hc_mult * size
        self.hc_head_fn = _float32(self.hc_mult, streams)
        self.hc_head_base = _float32(self.hc_mult)
        self.hc_head_scale = _float32(1)
        self.hc_head_op = HCHeadOp()
        self.shared_head = SharedHead(config=config, prefix=prefix, quant_config=quant_config)
        self.mtp_block = DeepseekV4DecoderLayer(
            vllm_config, prefix, topk_indices_buffer=topk_indices
        )
        # vLLM's weight loader asks; this block's experts are never fused across ranks.
        self.mtp_block.ffn.use_mega_moe = False

    def forward(
        self, positions: torch.Tensor, streams: torch.Tensor, embeds: torch.Tensor
    ) -> torch.Tensor:
        """Args: positions ``[tokens]``; streams ``[tokens, hc_mult * hidden]``, the target's or
        the last draft step's; embeds ``[tokens, hidden]``. Returns streams of the same shape."""
        embeds = torch.where(positions[:, None] == 0, 0, embeds)
        streams = self.hnorm(streams.view(-1, self.hc_mult, self.hidden_size).contiguous())
        mixed = self.h_proj(streams) + self.e_proj(self.enorm(embeds)).unsqueeze(-2)
        mixed, *_ = self.mtp_block(positions=positions, x=mixed, input_ids=None)
        return mixed.flatten(1)

    def hidden(self, streams: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` for the vocabulary's projection, out of the streams."""
        collapsed = self.hc_head_op(
            streams.view(-1, self.hc_mult, self.hidden_size),
            self.hc_head_fn,
            self.hc_head_scale,
            self.hc_head_base,
            self.rms_norm_eps,
            self.hc_eps,
        )
        return self.shared_head.norm(collapsed)


class DraftStack(nn.Module):
    """All draft layers; step ``i`` of a draft uses layer ``i`` modulo their number."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.mtp_start_layer_idx = config.num_hidden_layers
        self.num_mtp_layers = config.num_nextn_predict_layers
        # Draft layers read a window only; the block's constructor wants the buffer all the same.
        topk_indices = torch.empty((1, config.index_topk), dtype=torch.int32)
        self.layers = nn.ModuleDict(
            {
                str(index): DraftLayer(vllm_config, topk_indices, f"{prefix}.layers.{index}")
                for index in range(
                    self.mtp_start_layer_idx, self.mtp_start_layer_idx + self.num_mtp_layers
                )
            }
        )
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def layer(self, step: int) -> DraftLayer:
        return self.layers[str(self.mtp_start_layer_idx + step % self.num_mtp_layers)]

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        previous_hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return self.layer(spec_step_idx)(positions, previous_hidden_states, embeds)

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        layer = self.layer(spec_step_idx)
        return self.logits_processor(layer.shared_head.head, layer.hidden(hidden_states))


class DeepSeekV4MTP(LoadsWholeCheckpoint, LoadsReleasedForm, VllmDeepSeekV4MTP):
    """vLLM's draft model with the stack above."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        require_our_platform()
        nn.Module.__init__(self)
        self.config = vllm_config.model_config.hf_config
        self.dequantise = must_dequantise(vllm_config)
        config = bf16_config(vllm_config)
        self.quant_config = config.quant_config
        self.model = DraftStack(vllm_config=config, prefix=maybe_prefix(prefix, "model"))
        attentions = [m for m in self.modules() if isinstance(m, DeepseekV4CPUAttention)]
        self.arena: RingArena = put_model_on_rings(attentions, vllm_config)
        prepare(self)
        self.expect_checkpoint(vllm_config, drafts=True)

    def finalize_mega_moe_weights(self) -> None:
        """Nothing to do: no experts are fused across ranks."""


def _float32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
