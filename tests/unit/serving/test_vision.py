"""The vision model looks its language model up under our name: the outer model is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import PretrainedConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.model_arch_config_convertor import DeepseekV4ModelArchConfigConvertor

from vllm_dsv4.architectures import ARCHITECTURE, VISION_ARCHITECTURE
from vllm_dsv4.serving.platform import note_what_passes_through, serves_on_rings


def config_of(architecture: str, **entries: object) -> SimpleNamespace:
    hf_config = SimpleNamespace(architectures=[architecture], **entries)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))


def test_the_outer_model_goes_through_the_refusals() -> None:
    assert serves_on_rings(config_of(VISION_ARCHITECTURE))


def test_without_rings_it_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DSV4_RING", "0")
    config = config_of(VISION_ARCHITECTURE)
    assert not serves_on_rings(config)
    note_what_passes_through(config)


def test_vllm_still_makes_the_outer_model_of_a_checkpoint_with_a_vision_tower() -> None:
    """By the names that are refused; ``check_vision`` reads the entry as well."""
    hf_config = PretrainedConfig(architectures=[ARCHITECTURE], vision_n_layers=24)
    DeepseekV4ModelArchConfigConvertor(hf_config, hf_config)
    assert hf_config.architectures == [VISION_ARCHITECTURE]
    assert VISION_ARCHITECTURE in ModelRegistry.get_supported_archs()
