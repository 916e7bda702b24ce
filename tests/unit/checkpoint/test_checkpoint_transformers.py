"""transformers' own DeepSeek-V4 loads what ``make-tiny`` writes, and tells its tokens apart."""

import re
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from vllm_dsv4.checkpoint.config import Form, Shape
from vllm_dsv4.checkpoint.write import make_tiny
from vllm_dsv4.commands.cli.main import main


@pytest.mark.parametrize("form", [Form.BF16, Form.DEQUANTISED])
def test_transformers_finds_every_tensor_and_knows_every_name(tmp_path: Path, form: Form) -> None:
    shape = Shape(ratios=(0, 0, 4, 128), vocab=1024, mtp=1)
    make_tiny(tmp_path, shape, form=form)
    model, report = DeepseekV4ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert {kind: names for kind, names in report.items() if names} == {}
    assert model.config.layer_types == [
        "sliding_attention",
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ]
    assert model.config.mlp_layer_types == ["hash_moe", "hash_moe", "moe", "moe"]
    prompt = torch.arange(150).remainder(shape.vocab)[None]
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 154)


def test_the_usual_model_separates_its_best_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["make-tiny", str(tmp_path / "model")]) == 0
    shown = re.search(r"median gap ([\d.]+)", capsys.readouterr().out)
    assert shown is not None
    assert float(shown[1]) > 1.0


def test_a_token_far_back_still_decides_the_next_one(tmp_path: Path) -> None:
    """Through compressed history: the windows of three layers reach 381 tokens back."""
    shape = Shape(ratios=(0, 4, 128), vocab=1024)
    make_tiny(tmp_path, shape)
    model = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = torch.arange(600).remainder(shape.vocab)[None]
    changed = prompt.clone()
    changed[0, 100] = 1000
    with torch.inference_mode():
        before, after = (model(ids).logits[0, -1] for ids in (prompt, changed))
    assert (after - before).std() > 0.003 * before.std()
