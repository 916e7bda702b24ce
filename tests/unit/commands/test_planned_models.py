"""Which models can be planned, and which flags are refused before vLLM is imported."""

import json
from pathlib import Path

import pytest

from vllm_dsv4.checkpoint.config import Form, Shape, config_json
from vllm_dsv4.commands.planner.models import RELEASED, UnknownModel, find_model
from vllm_dsv4.commands.planner.options import BadFlag, PlanOptions


def test_flash_has_21_csa_and_20_hca_layers_behind_two_window_layers():
    ratios = RELEASED["flash"].layer_ratios
    assert ratios[:5] == (0, 0, 4, 128, 4)
    assert (len(ratios), ratios.count(4), ratios.count(128)) == (43, 21, 20)


def test_pro_has_30_csa_and_31_hca_layers():
    ratios = RELEASED["pro"].layer_ratios
    assert ratios[:5] == (128, 128, 4, 128, 4)
    assert (len(ratios), ratios.count(4), ratios.count(128)) == (61, 30, 31)


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_checkpoints_config_is_found_by_folder_and_by_file(tmp_path: Path, as_folder: bool):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_json(Shape(ratios=(0, 4, 128), mtp=1), Form.BF16)))
    model = find_model(str(tmp_path if as_folder else file))
    assert model.layer_ratios == (0, 4, 128)
    assert model.draft_layers == 1
    assert model.max_positions == 65536


def test_a_model_that_does_not_exist_names_those_that_do():
    with pytest.raises(UnknownModel, match=r"'flush'.*'flash'.*'pro'.*config\.json"):
        find_model("flush")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"head_dim": 256}, "head_dim 256"),
        ({"sliding_window": 64}, "sliding_window 64"),
        ({"compress_ratios": [0]}, "compress_ratios has 1 entries"),
        ({"compress_ratios": [0, 0, 4, 16, 4]}, "compress_ratios holds 16"),
        ({"compress_ratios": [0] * 5}, "compress_ratios .* no layer compresses"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers -1"),
        ({"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers 'x'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings 'x'"),
        ({"max_position_embeddings": 65536.5}, "max_position_embeddings 65536.5"),
    ],
)
def test_a_config_that_cannot_be_planned_says_which_entry(tmp_path: Path, change: dict, says: str):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_json(Shape(), Form.BF16) | change))
    with pytest.raises(UnknownModel, match=says):
        find_model(str(file))


def test_a_config_that_is_no_json_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnknownModel, match="cannot be read as JSON"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("max_model_len", 0),
        ("max_model_len", 2_000_000),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 128),
        ("tensor_parallel_size", 0),
        ("speculative_tokens", -1),
        ("speculative_method", "eagle"),
        ("speculative_tokens", 129),
        ("gpu_memory_gib", 0.0),
        ("gpu_memory_gib", float("nan")),
        ("gpu_memory_gib", float("inf")),
        ("weights_gib", -1.0),
        ("weights_gib", float("nan")),
        ("weights_gib", float("inf")),
    ],
)
def test_a_bad_flag_is_refused_by_name_and_value(flag: str, value: object):
    with pytest.raises(BadFlag, match=f"--{flag.replace('_', '-')} {value}: "):
        PlanOptions(RELEASED["flash"], **{flag: value})


@pytest.mark.parametrize("layers", [{}, {"num_nextn_predict_layers": 0}])
def test_drafts_of_a_checkpoint_without_draft_layers_are_refused(tmp_path: Path, layers: dict):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_json(Shape(), Form.BF16) | layers))
    model = find_model(str(file))
    with pytest.raises(BadFlag, match=r"--speculative-method mtp: .*num_nextn_predict_layers"):
        PlanOptions(model, max_model_len=1024, speculative_tokens=2)
    PlanOptions(model, max_model_len=1024, speculative_tokens=2, speculative_method="ngram")


def test_weights_are_shared_by_the_cards_and_the_cache_is_not():
    options = PlanOptions(
        RELEASED["flash"], gpu_memory_gib=100, weights_gib=160, tensor_parallel_size=2
    )
    assert options.cache_bytes == 20 * 2**30


def test_only_drafting_with_mtp_adds_a_window_layer():
    def layers(**flags: object) -> int:
        return len(PlanOptions(RELEASED["flash"], **flags).all_ratios)

    assert layers() == 43
    assert layers(speculative_tokens=2) == 44
    assert layers(speculative_tokens=2, speculative_method="ngram") == 43
