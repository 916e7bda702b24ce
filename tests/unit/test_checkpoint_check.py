"""A damaged checkpoint is refused by the name of what is damaged, a sound one passes unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_dsv4.checkpoint.check import CheckedWeights, CheckpointError
from vllm_dsv4.checkpoint.config import Form, Shape, config_json
from vllm_dsv4.checkpoint.expected import ServedShape, expected_tensors
from vllm_dsv4.checkpoint.names import FLOAT32_KINDS, Kind, Quant, Spec, tensors
from vllm_dsv4.models.common import LoadsWholeCheckpoint

SHAPE = ServedShape(ratios=(0, 0, 4, 128), vocab=512, mtp=1, experts=4, hashed=frozenset({0, 1}))
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
E8M0 = torch.float8_e8m0fnu
Weights = dict[str, Tensor]


def hf_config(shape: Shape = SHAPE, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**config_json(shape, Form.BF16) | changes)


def stored(spec: Spec, released: bool) -> Weights:
    """Empty tensors as a file of either form has them."""
    if spec.kind is Kind.EXPERT_TABLE:
        return {spec.name: torch.empty(spec.shape, dtype=torch.int32, device="meta")}
    dtype = torch.float32 if spec.kind in FLOAT32_KINDS else torch.bfloat16
    if not released or spec.quant is Quant.NONE:
        return {spec.name: torch.empty(spec.shape, dtype=dtype, device="meta")}
    (rows, columns), scale = spec.shape, spec.name.removesuffix("weight") + "scale"
    if spec.quant is Quant.BLOCK_FP8:
        weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
        blocks = (-(-rows // 128), -(-columns // 128))
    else:
        weight = torch.empty(rows, columns // 2, dtype=torch.int8, device="meta")
        blocks = (rows, columns // 32)
    return {scale: torch.empty(blocks, dtype=E8M0, device="meta"), spec.name: weight}


def checkpoint(released: bool = False, shape: Shape = SHAPE) -> Weights:
    return {k: v for spec in tensors(shape) for k, v in stored(spec, released).items()}


def load(
    weights: Weights | Iterable[tuple[str, Tensor]],
    quantisation: dict[str, Any] | None = None,
    drafts: bool = False,
    config: Any = None,
    where: str = "org/model",
) -> list[str]:
    """Names that passed."""
    pairs = weights.items() if isinstance(weights, dict) else weights
    expected = expected_tensors(config or hf_config(), SHAPE.ratios, drafts)
    checked = CheckedWeights(pairs, expected, quantisation, where)
    passed = [name for name, _ in checked]
    checked.check_complete()
    return passed


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_a_sound_checkpoint_passes_whole_and_in_order(released: bool, drafts: bool) -> None:
    weights = checkpoint(released)
    assert load(weights, FP8 if released else None, drafts) == list(weights)


@pytest.mark.parametrize("released", [False, True])
def test_every_missing_tensor_is_named(released: bool) -> None:
    """Each in turn, experts and scales too; the draft's copies of the embedding and the head are
    the target's, which vLLM shares."""
    weights = checkpoint(released)
    quantisation = FP8 if released else None
    shared = {spec.name for spec in tensors(SHAPE) if spec.copy_of}
    assert len(shared) == 2
    for name in weights:
        rest = ((n, t) for n, t in weights.items() if n != name)
        if name in shared:
            load(rest, quantisation, drafts=True)
            continue
        with pytest.raises(CheckpointError, match=rf"missing: {name}\. Fetch"):
            load(rest, quantisation, drafts=name.startswith("mtp."))


def test_of_many_missing_tensors_the_first_are_named_and_the_rest_counted() -> None:
    weights = {n: t for n, t in checkpoint().items() if not n.startswith("layers.1.ffn.experts.")}
    with pytest.raises(CheckpointError, match=r"missing: layers\.1\.ffn.* and 7 more"):
        load(weights)


def longer(tensor: Tensor) -> Tensor:
    return torch.empty((tensor.shape[0] + 1, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")


def shorter(tensor: Tensor) -> Tensor:
    return tensor[1:]


def flat(tensor: Tensor) -> Tensor:
    return tensor[None]


@pytest.mark.parametrize("change", [longer, shorter, flat])
@pytest.mark.parametrize("released", [False, True])
def test_every_misshapen_tensor_is_named_with_both_shapes(
    released: bool, change: Callable[[Tensor], Tensor]
) -> None:
    weights = checkpoint(released)
    for name in weights:
        changed = change(weights[name])
        found, wanted = list(changed.shape), list(weights[name].shape)
        with pytest.raises(CheckpointError) as caught:
            load(weights | {name: changed}, FP8 if released else None, name.startswith("mtp."))
        message = str(caught.value)
        assert f"tensor {name} has shape {found}, and config.json makes it {wanted}" in message


@pytest.mark.parametrize(
    ("ratios", "tensor"),
    [
        ([0, 0, 128, 128], "layers.2.attn.compressor.wkv.weight"),
        ([0, 0, 4, 4], "layers.3.attn.compressor.wkv.weight"),
        ([0, 4, 4, 128], "layers.1.attn.compressor.wkv.weight"),
    ],
)
def test_a_ratio_list_that_is_not_the_checkpoints_is_seen(ratios: list[int], tensor: str) -> None:
    expected = expected_tensors(hf_config(), tuple(ratios))
    with pytest.raises(CheckpointError, match=tensor):
        checked = CheckedWeights(checkpoint().items(), expected, None, "m")
        list(checked)
        checked.check_complete()


def test_quantised_tensors_need_a_quantisation_in_the_config() -> None:
    with pytest.raises(CheckpointError, match=r"wq_a\.scale is .*no quantization_config"):
        load(checkpoint(released=True))
    cast = checkpoint() | {
        "layers.0.attn.wq_a.weight": torch.empty(128, 256, dtype=torch.float8_e4m3fn)
    }
    with pytest.raises(CheckpointError, match=r"wq_a\.weight is torch\.float8_e4m3fn, and config"):
        load(cast)


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("layers.0.ffn.gate.tid2eid", torch.bfloat16, "whole numbers"),
        ("layers.0.attn_norm.weight", torch.int64, "fractions"),
        ("head.weight", torch.bool, "fractions"),
    ],
)
def test_a_tensor_of_the_wrong_type_is_named(name: str, dtype: torch.dtype, kind: str) -> None:
    weights = checkpoint()
    weights[name] = torch.empty(weights[name].shape, dtype=dtype)
    with pytest.raises(CheckpointError, match=rf"{name} is {dtype}, and must hold {kind}"):
        load(weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_another_float_type_and_wide_tables_pass(dtype: torch.dtype) -> None:
    """vLLM casts them as it copies."""
    weights = {
        name: tensor.to(dtype if tensor.is_floating_point() else torch.int64)
        for name, tensor in checkpoint().items()
    }
    load(weights)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_scales_under_another_name_count(suffix: str) -> None:
    weights = {n.replace(".scale", f".{suffix}"): t for n, t in checkpoint(released=True).items()}
    load(weights, FP8)


def test_tensors_that_the_config_does_not_ask_for_are_left_to_vllm() -> None:
    extra = checkpoint() | {"layers.0.attn.extra": torch.zeros(3)}
    assert "layers.0.attn.extra" in load(extra)


def test_a_model_without_the_usual_router_bias_or_with_two_shared_experts_passes() -> None:
    weights = {n: t for n, t in checkpoint().items() if not n.endswith("gate.bias")}
    load(weights, config=hf_config(topk_method="greedy"))
    weights = {n: t for n, t in checkpoint().items() if ".shared_experts." not in n}
    load(weights, config=hf_config(n_shared_experts=2))


def test_hashed_layers_are_found_in_transformers_form_of_the_config() -> None:
    config = hf_config(mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"])
    del config.num_hash_layers
    load(checkpoint(), config=config)


def test_the_released_models_sizes_are_not_those_of_small_ones() -> None:
    """384 experts, 61 layers, two draft layers: nothing of ``make-tiny``'s limits holds here."""
    big = hf_config(n_routed_experts=8, num_nextn_predict_layers=2, hidden_size=7168)
    drafts = expected_tensors(big, (128,) * 61, drafts=True)
    assert {name.split(".")[1] for name in drafts} == {"0", "1"}
    expected = expected_tensors(big, (128,) * 61)
    assert expected["layers.60.ffn.experts.7.w2.weight"].shape == (7168, 128)


def reading(weights: Weights, stop_at: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        if name == stop_at:
            raise OSError("file not fully covered")
        yield name, tensor


def test_a_read_that_stops_names_the_last_tensor() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"after tensor layers\.0\.attn_norm\.weight .*OSError: file not fully covered",
    ):
        load(reading(checkpoint(), "layers.0.ffn_norm.weight"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and their index."""
    names = ("a", "b")
    for name in names:
        save_file({name: torch.zeros(64)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_damaged_and_absent_files_are_named(folder: Path) -> None:
    whole = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(whole[:-100])
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors \(.*; b\.safetensors \(absent\)"):
        load({}, where=str(folder))


def test_sound_files_are_not_blamed(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load({}, where=str(folder))
    assert "Damaged" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"weight_map": 3}), "{}"])
def test_a_damaged_index_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json \("):
        load({}, where=str(folder))


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
    pass


def vllm_config(load_format: str = "auto", **parallel: bool) -> Any:
    chosen = {"enable_expert_parallel": False, "enable_ep_weight_filter": False} | parallel
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format),
        parallel_config=SimpleNamespace(**chosen),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=hf_config(), model="org/model"),
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


def test_a_quantised_tensor_that_vllm_keeps_wide_is_named() -> None:
    name = "layers.2.attn.indexer.weights_proj.weight"
    weights = checkpoint(released=True)
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    with pytest.raises(
        CheckpointError, match=rf"{name} is torch\.float8_e4m3fn, and vLLM does not"
    ):
        load(weights, quantisation=FP8)


def test_a_narrow_expert_table_passes() -> None:
    weights = checkpoint()
    tables = [name for name in weights if name.endswith("tid2eid")]
    assert tables
    weights |= {name: weights[name].to(torch.uint8) for name in tables}
    load(weights)


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
