"""A damaged checkpoint is refused by the name of what is damaged, a sound one passes unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.checkpoints import FP8, SHAPE, Weights, checkpoint, hf_config, load
from vllm_dsv4.checkpoint.check import CheckedWeights, CheckpointError
from vllm_dsv4.checkpoint.expected import expected_tensors
from vllm_dsv4.checkpoint.names import tensors


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
    "overrides",
    [
        {"num_hidden_layers": 2},
        {"compress_ratios": [0, 0]},
        {"n_routed_experts": 8, "rope_theta": 1.0},
        {"quantization_config": None},
    ],
)
def test_an_override_that_asks_for_other_tensors_is_the_remedy(
    overrides: dict[str, object],
) -> None:
    weights = checkpoint()
    del weights["norm.weight"]
    with pytest.raises(CheckpointError, match="Remove that override") as caught:
        load(weights, overrides=overrides)
    message = str(caught.value)
    name, value = next(iter(overrides.items()))
    assert f"--hf-overrides asks for {name}={value!r}" in message
    assert "Fetch the checkpoint again" not in message
    assert "rope_theta" not in message


def test_an_override_of_something_else_is_not() -> None:
    weights = checkpoint()
    del weights["norm.weight"]
    with pytest.raises(CheckpointError, match="Fetch the checkpoint again"):
        load(weights, overrides={"rope_theta": 1.0})
