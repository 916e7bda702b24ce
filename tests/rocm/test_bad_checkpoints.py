"""Models of both platforms, target and draft: what they load is whole, or named as it is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from tests.rocm.rig import make_config
from tests.rocm.test_model import GIB, build
from vllm_dsv4.checkpoint.check import CheckpointError
from vllm_dsv4.cpu import draft as draft_cpu
from vllm_dsv4.cpu import model as cpu
from vllm_dsv4.rocm import draft as draft_rocm
from vllm_dsv4.rocm import model as rocm

TARGETS = [cpu.DeepseekV4ForCausalLM, rocm.DeepseekV4ForCausalLM]
DRAFTS = [draft_cpu.DeepSeekV4MTP, draft_rocm.DeepSeekV4MTP]
LOST = "layers.3.ffn.experts.17.w3.weight"
LOST_DRAFT = "mtp.0.attn.wkv.weight"


def made(cls: type[Any], tiny: Callable[..., Path], form: str = "bf16") -> tuple[Any, Path]:
    """A model of ``cls``, every fraction in it NaN, and the folder of its checkpoint."""
    if cls in DRAFTS:
        folder = tiny(form, mtp=1)
        config = make_config(folder, drafts=1, method="mtp")
        config = replace(config, model_config=config.speculative_config.draft_model_config)
    else:
        folder = tiny(form)
        config = make_config(folder)
    model = build(config, free=64 * GIB, cls=cls)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    return model, folder


def tensors_of(folder: Path, without: str = "") -> Iterator[tuple[str, Tensor]]:
    """As vLLM reads them."""
    files = sorted(str(file) for file in folder.glob("*.safetensors"))
    for name, tensor in safetensors_weights_iterator(files, use_tqdm_on_load=False):
        if name != without:
            yield name, tensor


def left_over(model: Any) -> list[str]:
    """Parameters that still hold a NaN."""
    return [name for name, parameter in model.named_parameters() if parameter.isnan().any()]


@pytest.mark.parametrize("cls", TARGETS + DRAFTS)
def test_a_sound_checkpoint_fills_every_value_of_every_parameter(cls, tiny) -> None:
    model, folder = made(cls, tiny)
    loaded = model.load_weights(tensors_of(folder))
    assert loaded == {name for name, _ in model.named_parameters()}
    assert left_over(model) == []


@pytest.mark.parametrize("cls", [TARGETS[0], DRAFTS[0]])
def test_so_does_a_released_one(cls, tiny) -> None:
    """Where the layers are bf16; vLLM has no fp8 layers for this machine."""
    model, folder = made(cls, tiny, "released")
    model.load_weights(tensors_of(folder))
    assert left_over(model) == []


@pytest.mark.parametrize("cls", TARGETS + DRAFTS)
def test_a_lost_tensor_is_named(cls, tiny) -> None:
    model, folder = made(cls, tiny)
    lost = LOST_DRAFT if cls in DRAFTS else LOST
    with pytest.raises(CheckpointError, match=f"missing: {lost}"):
        model.load_weights(tensors_of(folder, without=lost))


@pytest.mark.parametrize("part", ["weight", "scale"])
def test_half_of_a_quantised_tensor_is_named(tiny, part: str) -> None:
    model, folder = made(TARGETS[0], tiny, "released")
    lost = LOST.removesuffix("weight") + part
    with pytest.raises(CheckpointError, match=f"missing: {lost}"):
        model.load_weights(tensors_of(folder, without=lost))


@pytest.mark.parametrize("cls", TARGETS)
def test_vllm_alone_would_start_without_it(cls, tiny) -> None:
    """When this fails, vLLM sees lost tensors by itself, and the check may go."""
    model, folder = made(cls, tiny)
    model._expected = None
    loaded = model.load_weights(tensors_of(folder, without=LOST))
    assert loaded == {name for name, _ in model.named_parameters()}
    assert left_over(model) == ["model.layers.3.ffn.experts.routed_experts.w13_weight"]


@pytest.mark.parametrize("cls", TARGETS)
def test_a_tensor_that_the_model_does_not_know_is_named(cls, tiny) -> None:
    model, folder = made(cls, tiny)
    known = tensors_of(folder)
    with pytest.raises(CheckpointError, match=r"tensor layers\.0\.attn\.wk\.weight .* KeyError"):
        model.load_weights([("layers.0.attn.wk.weight", torch.zeros(2, 2)), *known])


def test_a_file_that_was_cut_off_is_named(tiny, tmp_path: Path) -> None:
    model, folder = made(TARGETS[0], tiny)
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    file = max(copy.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])
    model._expected.model_config.model = str(copy)
    with pytest.raises(CheckpointError, match=rf"{file.name} \(.*") as caught:
        model.load_weights(tensors_of(copy))
    assert isinstance(caught.value.__cause__, SafetensorError)
