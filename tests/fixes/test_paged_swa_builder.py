"""The answers of the CPU's paged SWA metadata builder."""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder

from vllm_dsv4.fixes.paged_swa_builder import LAYER_TYPES, PagedSWABackend, PagedSWAMetadataBuilder


def answers(builder: type[Any]) -> dict[str, Any]:
    """Of a builder that was not set up: neither looks at itself."""
    found: dict[str, Any] = builder.build_tile_scheduler(builder.__new__(builder), 1)
    return found


def test_vllm_still_needs_it() -> None:
    missing = set(LAYER_TYPES) - answers(DeepseekV4CPUSparseSWAMetadataBuilder).keys()
    assert missing == {"c1a", "c2a"}, "vLLM answers for all layer types: remove the fix"


def test_ours_answers_for_every_layer_type() -> None:
    assert answers(PagedSWAMetadataBuilder) == dict.fromkeys(LAYER_TYPES)
    assert PagedSWABackend.get_builder_cls() is PagedSWAMetadataBuilder
