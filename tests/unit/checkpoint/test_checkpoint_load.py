"""A model's first load is checked as a whole; what the check does not know is left to vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import checkpoint, hf_config
from vllm_dsv4.checkpoint.check import CheckpointError
from vllm_dsv4.serving.model import LoadsWholeCheckpoint


class Loader:
    """What vLLM's models do, reduced: take every tensor, and say what was filled."""

    def __init__(self, fails_at: str = "", parameters: tuple[str, ...] = ("a.weight",)) -> None:
        self.fails_at = fails_at
        self.parameters = parameters
        self.loads = 0

    def named_parameters(self) -> list[tuple[str, None]]:
        return [(name, None) for name in self.parameters]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.loads += 1
        for name, _ in weights:
            if name == self.fails_at:
                raise AssertionError
        if self.fails_at == "the end":
            raise ValueError("draft weights missing")
        return {"a.weight"}


class Model(LoadsWholeCheckpoint, Loader):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arena: Any = SimpleNamespace(weights_loaded=0)


def vllm_config(load_format: str = "auto", **parallel: bool) -> Any:
    chosen = {"enable_expert_parallel": False, "enable_ep_weight_filter": False} | parallel
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format),
        parallel_config=SimpleNamespace(**chosen),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=hf_config(), model="org/model", hf_overrides={}),
    )


def test_a_failure_of_vllms_loader_gets_the_tensors_name() -> None:
    model = Model(fails_at="layers.2.attn.wq_b.weight")
    model.expect_checkpoint(vllm_config())
    with pytest.raises(CheckpointError, match=r"tensor layers\.2\.attn\.wq_b.*AssertionError"):
        model.load_weights(checkpoint().items())


def test_a_failure_at_the_end_names_what_never_came_or_is_told_as_it_is() -> None:
    model = Model(fails_at="the end")
    model.expect_checkpoint(vllm_config(), drafts=True)
    with pytest.raises(CheckpointError, match=r"missing: mtp\.0\.enorm\.weight"):
        model.load_weights((n, t) for n, t in checkpoint().items() if "mtp" not in n)
    model.expect_checkpoint(vllm_config())
    with pytest.raises(CheckpointError, match="loading failed: ValueError: draft weights missing"):
        model.load_weights(checkpoint().items())


def test_only_the_first_load_must_be_whole() -> None:
    model = Model()
    model.expect_checkpoint(vllm_config())
    with pytest.raises(CheckpointError):
        model.load_weights([])
    assert model.load_weights([]) == {"a.weight"}


def test_dummy_weights_expect_no_checkpoint() -> None:
    model = Model()
    model.expect_checkpoint(vllm_config(load_format="dummy"))
    model.load_weights([])
    assert model.loads == 1


def test_experts_that_vllm_leaves_in_the_file_are_not_missed() -> None:
    config = vllm_config(enable_expert_parallel=True, enable_ep_weight_filter=True)
    model = Model()
    model.expect_checkpoint(config)
    model.load_weights((n, t) for n, t in checkpoint().items() if ".experts.3." not in n)
    model.expect_checkpoint(config)
    with pytest.raises(CheckpointError, match="gate"):
        model.load_weights((n, t) for n, t in checkpoint().items() if ".gate." not in n)


def test_a_quantised_layer_that_got_no_scales_is_named() -> None:
    model = Model(parameters=("a.weight", "a.weight_scale_inv"))
    model.expect_checkpoint(vllm_config())
    with pytest.raises(CheckpointError, match=r"no scales for a\.weight_scale_inv"):
        model.load_weights(checkpoint().items())


def test_who_knows_better_can_switch_the_check_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DSV4_CHECK_CHECKPOINT", "0")
    model = Model()
    model.expect_checkpoint(vllm_config())
    model.load_weights([])
    assert model.loads == 1


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_no_memory_is_no_fault_of_the_checkpoint(error: type[Exception]) -> None:
    """vLLM catches it to say what to lower."""

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield from list(checkpoint().items())[:3]
        raise error

    model = Model()
    model.expect_checkpoint(vllm_config())
    with pytest.raises(error):
        model.load_weights(weights())


@pytest.mark.parametrize(
    ("load_format", "changes"),
    [
        ("sharded_state", {}),
        ("auto", {"quantization_config": {"quant_method": "quark"}}),
        ("auto", {"compression_config": {"format": "int-quantized"}}),
    ],
)
def test_what_is_in_another_form_is_left_to_vllm(load_format: str, changes: dict[str, Any]) -> None:
    config = vllm_config(load_format=load_format)
    config.model_config.hf_config = hf_config(**changes)
    model = Model()
    model.expect_checkpoint(config)
    model.load_weights([])
    assert model.loads == 1


def test_a_draft_checkpoint_of_its_own_is_left_to_vllm() -> None:
    config = vllm_config()
    draft = SimpleNamespace(model="org/another")
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    model = Model()
    model.expect_checkpoint(config, drafts=True)
    model.load_weights([])
    assert model.loads == 1
