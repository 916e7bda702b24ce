"""vLLM 0.32's paged SWA metadata builder fails on the CPU with ``KeyError: 'c1a'``.

Reason: ``DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler`` (``cpu/cpu_mla.py``) answers
for three layer types, and ``DeepseekSparseSWAMetadataBuilder.build`` asks for five.
Remove when the former names all of them; a test fails then. Used with ``VLLM_DSV4_RING=0`` only.
"""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
from vllm.v1.attention.backends.mla import sparse_swa

LAYER_TYPES = tuple(
    value for name, value in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")
)


class PagedSWAMetadataBuilder(DeepseekV4CPUSparseSWAMetadataBuilder):
    """The CPU builder with an answer, None, for every layer type that vLLM names."""

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, Any]:
        return dict.fromkeys(LAYER_TYPES)


class PagedSWABackend(sparse_swa.DeepseekSparseSWABackend):
    """vLLM's backend with the builder above."""

    @staticmethod
    def get_builder_cls() -> type[PagedSWAMetadataBuilder]:
        return PagedSWAMetadataBuilder
