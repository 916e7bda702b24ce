"""Plans of several engines: what a card holds of the weights, and what all engines hold."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_dsv4.checkpoint.config import Form, Shape, config_json
from vllm_dsv4.checkpoint.write import make_tiny
from vllm_dsv4.commands.cli.main import main
from vllm_dsv4.commands.planner.models import RELEASED, find_model
from vllm_dsv4.commands.planner.options import GIB, BadFlag, PlanOptions
from vllm_dsv4.commands.planner.plan import DoesNotFit, make_plan
from vllm_dsv4.commands.planner.suggest import suggestions

PRO = PlanOptions(
    RELEASED["pro"],
    gpu_memory_gib=230,
    weights_gib=860,
    data_parallel_size=8,
    enable_expert_parallel=True,
)
EXPERTS = 62 * 384 * 3 * 7168 * 3072 * 17 / 32 / GIB
"""GiB: fp4, and a byte of scale for 32 of them; the draft layer has its own."""


@pytest.mark.parametrize("form", list(Form))
def test_the_experts_of_a_checkpoint_are_as_large_as_its_config_says(tmp_path: Path, form: Form):
    from safetensors import safe_open

    make_tiny(tmp_path, Shape(ratios=(0, 4), mtp=1, vocab=512), form=form)
    found = 0
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if ".ffn.experts." in name:
                    tensor = tensors.get_tensor(name)
                    found += tensor.numel() * tensor.element_size()
    assert find_model(str(tmp_path)).expert_bytes == found


def test_engines_share_the_experts_and_copy_the_rest():
    assert PRO.card_weights_gib == pytest.approx(EXPERTS / 8 + 860 - EXPERTS)
    sixteen = replace(PRO, data_parallel_size=16)
    assert sixteen.card_weights_gib == pytest.approx(EXPERTS / 16 + 860 - EXPERTS)
    by_two = replace(PRO, tensor_parallel_size=2)
    assert by_two.cards == 16
    assert by_two.card_weights_gib == pytest.approx(EXPERTS / 16 + (860 - EXPERTS) / 2)


def test_one_engine_shares_every_weight_whatever_its_experts():
    alone = replace(PRO, data_parallel_size=1, tensor_parallel_size=8)
    assert alone.card_weights_gib == pytest.approx(860 / 8)
    assert replace(alone, enable_expert_parallel=False).card_weights_gib == pytest.approx(860 / 8)


def test_the_card_with_most_experts_counts():
    """384 experts over 10 cards: some have 39. Parts of experts are spread evenly."""
    ten = replace(PRO, data_parallel_size=10)
    assert ten.card_weights_gib == pytest.approx(EXPERTS * 39 / 384 + 860 - EXPERTS)
    parts = replace(ten, enable_expert_parallel=False)
    assert parts.card_weights_gib == pytest.approx(EXPERTS / 10 + 860 - EXPERTS)


def test_an_engine_is_planned_as_one_with_that_much_memory():
    plan = make_plan(PRO)
    alone = make_plan(
        PlanOptions(RELEASED["pro"], gpu_memory_gib=230, weights_gib=PRO.card_weights_gib)
    )
    assert (plan.rings, plan.native) == (alone.rings, alone.native)
    deployment = plan.to_json()["deployment"]
    assert deployment["slots"] == 8 * plan.rings.num_slots == 8 * 256
    assert deployment["tokens"] == 8 * plan.rings.tokens
    assert (deployment["engines"], deployment["cards"]) == (8, 8)


def test_the_report_says_what_an_engine_and_what_all_of_them_have(
    capsys: pytest.CaptureFixture[str],
):
    flags = ["pro", "--gpu-memory-gib", "230", "--weights-gib", "860", "--data-parallel-size", "8"]
    assert main(["plan", *flags, "--enable-expert-parallel", "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["deployment"]["tokens"]
    assert main(["plan", *flags, "--enable-expert-parallel"]) == 0
    text = capsys.readouterr().out
    assert "8 cards of 230 GiB in 8 engines, experts in parallel, 860 GiB of weights" in text
    assert "every card holds its engine's whole KV cache" in text
    assert f"2,048 slots and {tokens:,} tokens in all" in text


def test_weights_that_do_not_fit_are_explained_and_more_engines_are_offered():
    tight = replace(PRO, gpu_memory_gib=170)
    with pytest.raises(DoesNotFit, match=r"--data-parallel-size 8: 179.12 GiB of each card"):
        make_plan(tight)
    assert "--data-parallel-size 16" in suggestions(tight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data_parallel_size": 0}, "--data-parallel-size 0"),
        ({"experts_gib": 900.0}, "--experts-gib 900.*a part of --weights-gib 860"),
        ({"weights_gib": 100.0}, "--weights-gib 100.*the experts of DeepSeek-V4-Pro alone are 7"),
    ],
)
def test_what_no_engines_can_be_planned_with_is_refused(change: dict, says: str):
    with pytest.raises(BadFlag, match=says):
        replace(PRO, **change)


def test_experts_that_a_config_does_not_describe_are_asked_for(tmp_path: Path):
    config = config_json(Shape(), Form.BF16)
    del config["moe_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    unknown = replace(PRO, model=find_model(str(tmp_path)), max_model_len=8192, experts_gib=700.0)
    assert unknown.card_weights_gib == pytest.approx(700 / 8 + 160)
    with pytest.raises(BadFlag, match="Give --experts-gib"):
        replace(unknown, experts_gib=None)
