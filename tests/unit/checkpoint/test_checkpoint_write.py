"""What ``make_tiny`` writes: the same bytes for a seed, and all tensors the config implies."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vllm_dsv4.checkpoint import write
from vllm_dsv4.checkpoint.config import Form, Shape
from vllm_dsv4.checkpoint.dequantise import dequantised
from vllm_dsv4.checkpoint.errors import BadOption
from vllm_dsv4.checkpoint.names import tensors
from vllm_dsv4.checkpoint.write import make_tiny, weight_bytes

SMALL = Shape(ratios=(0, 4), vocab=1024)


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, found through its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            found[name] = shard.get_tensor(name)
    return found


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Form, Path]:
    """A checkpoint of each form, seed 0."""
    made = {form: tmp_path_factory.mktemp(form.value) for form in Form}
    for form, folder in made.items():
        make_tiny(folder, SMALL, form=form)
    return made


@pytest.mark.parametrize("form", list(Form))
def test_the_same_seed_gives_the_same_bytes(
    checkpoints: dict[Form, Path], tmp_path: Path, form: Form
) -> None:
    make_tiny(tmp_path, SMALL, seed=0, form=form)
    assert digests(tmp_path) == digests(checkpoints[form])


def test_another_seed_changes_every_random_tensor(
    checkpoints: dict[Form, Path], tmp_path: Path
) -> None:
    make_tiny(tmp_path, SMALL, seed=1)
    first, second = load(checkpoints[Form.BF16]), load(tmp_path)
    same = [name for name in first if torch.equal(first[name], second[name])]
    assert same == []


def test_files_hold_the_tensors_that_were_named_with_their_shapes(
    checkpoints: dict[Form, Path],
) -> None:
    found = load(checkpoints[Form.BF16])
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        spec.name: spec.shape for spec in tensors(SMALL)
    }


def test_large_models_are_cut_into_files_and_every_byte_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "SHARD_BYTES", 2 * 2**20)
    reported: list[int] = []
    shape = Shape(ratios=(0,), vocab=1024)
    size = make_tiny(tmp_path, shape, progress=reported.append)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 4
    assert all(path.stat().st_size < 2.1 * 2**20 for path in shards)
    assert size == sum(reported) == weight_bytes(shape)
    assert size == sum(tensor.nbytes for tensor in load(tmp_path).values())


def test_the_dequantised_form_equals_the_released_form_dequantised(
    checkpoints: dict[Form, Path],
) -> None:
    streamed = dict(dequantised(load(checkpoints[Form.RELEASED]).items()))
    twin = load(checkpoints[Form.DEQUANTISED])
    assert streamed.keys() == twin.keys()
    for name, tensor in twin.items():
        assert streamed[name].dtype == tensor.dtype, name
        assert torch.equal(streamed[name], tensor), name


def test_released_weights_are_fp8_with_block_scales_and_experts_fp4(
    checkpoints: dict[Form, Path],
) -> None:
    folder = checkpoints[Form.RELEASED]
    found = load(folder)
    for name, dtype, shape in (
        ("layers.0.attn.wkv.weight", torch.float8_e4m3fn, (512, 256)),
        ("layers.0.attn.wkv.scale", torch.float8_e8m0fnu, (4, 2)),
        ("layers.0.ffn.shared_experts.w2.weight", torch.float8_e4m3fn, (256, 128)),
        ("layers.0.ffn.experts.63.w1.weight", torch.int8, (128, 128)),
        ("layers.0.ffn.experts.63.w1.scale", torch.float8_e8m0fnu, (128, 8)),
        ("layers.1.attn.compressor.wkv.weight", torch.bfloat16, (1024, 256)),
        ("layers.1.attn.attn_sink", torch.float32, (4,)),
    ):
        assert found[name].dtype == dtype, name
        assert tuple(found[name].shape) == shape, name
    config = json.loads((folder / "config.json").read_text())
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"


def test_a_draft_layer_repeats_embedding_and_head(tmp_path: Path) -> None:
    make_tiny(tmp_path, Shape(ratios=(0,), vocab=1024, mtp=1))
    found = load(tmp_path)
    assert torch.equal(found["mtp.0.emb.tok_emb.weight"], found["embed.weight"])
    assert torch.equal(found["mtp.0.head.weight"], found["head.weight"])
    assert "mtp.0.e_proj.weight" in found
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["compress_ratios"] == [0, 0]
    assert config["num_hidden_layers"] == config["num_nextn_predict_layers"] == 1


def test_expert_tables_name_different_experts_for_a_token(
    checkpoints: dict[Form, Path],
) -> None:
    table = load(checkpoints[Form.BF16])["layers.0.ffn.gate.tid2eid"]
    assert table.dtype == torch.int32
    assert 0 <= int(table.min()) <= int(table.max()) < SMALL.experts
    assert all(len(set(row)) == SMALL.experts_per_token for row in table.tolist())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("do not touch")
    with pytest.raises(BadOption, match="is not empty; give a new folder"):
        make_tiny(tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
