"""Our model classes offer what vLLM's do, and refuse what vLLM's refuse, in vLLM's words."""

from __future__ import annotations

import pytest
from torch import nn
from vllm.model_executor.models import interfaces
from vllm.models.deepseek_v4.amd.model import DeepseekV4ForCausalLM as VllmRocmModel
from vllm.models.deepseek_v4.cpu.model import DeepseekV4ForCausalLM as VllmCpuModel
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from vllm_dsv4.cpu.model import DeepseekV4ForCausalLM as CpuModel
from vllm_dsv4.rocm.model import DeepseekV4ForCausalLM as RocmModel

MODELS = [(RocmModel, VllmRocmModel), (CpuModel, VllmCpuModel)]
ASKED = sorted(
    name
    for name in dir(interfaces)
    if name.startswith(("supports_", "is_", "has_")) and callable(getattr(interfaces, name))
)
"""Every question that vLLM asks of a model class: LoRA, pipeline stages, EAGLE-3, ..."""


@pytest.mark.parametrize(("ours", "vllms"), MODELS)
def test_what_vllms_class_offers_ours_keeps(ours: type, vllms: type) -> None:
    assert "supports_lora" in ASKED
    for name in ASKED:
        question = getattr(interfaces, name)
        try:
            wanted = question(vllms)
        except TypeError:  # a question of something else than a class
            continue
        assert bool(question(ours)) == bool(wanted), name


@pytest.mark.parametrize(("ours", "_"), MODELS)
def test_lora_is_refused_by_vllm_in_one_line(ours: type, _: type) -> None:
    """Fails when vLLM's class gets LoRA: ours has it then, and needs a test of its own."""
    model = nn.Module.__new__(ours)
    with pytest.raises(ValueError, match=r"^DeepseekV4ForCausalLM does not support LoRA yet"):
        LoRAModelRunnerMixin().load_lora_model(model, None, None)
