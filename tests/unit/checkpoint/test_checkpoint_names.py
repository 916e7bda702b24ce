"""The tensors of a checkpoint agree with what its config says."""

from vllm_dsv4.checkpoint.config import Form, Shape, config_json
from vllm_dsv4.checkpoint.names import Quant, tensors

SHAPE = Shape(ratios=(0, 128, 4), mtp=1)
CONFIG = config_json(SHAPE, Form.BF16)
SPECS = {spec.name: spec for spec in tensors(SHAPE)}


def shapes_under(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        name.removeprefix(prefix): spec.shape
        for name, spec in SPECS.items()
        if name.startswith(prefix)
    }


def test_no_tensor_is_named_twice() -> None:
    assert len(SPECS) == len(list(tensors(SHAPE)))


def test_every_layer_has_one_attention_and_all_experts_of_the_config() -> None:
    for layer in range(CONFIG["num_hidden_layers"]):
        names = shapes_under(f"layers.{layer}.")
        assert names["attn.wkv.weight"] == (CONFIG["head_dim"], CONFIG["hidden_size"])
        experts = {name.split(".")[2] for name in names if name.startswith("ffn.experts.")}
        assert experts == {str(expert) for expert in range(CONFIG["n_routed_experts"])}


def test_only_compressing_layers_have_compressors_and_only_c4_an_indexer() -> None:
    for layer, ratio in enumerate(SHAPE.ratios):
        compressor = shapes_under(f"layers.{layer}.attn.compressor.")
        indexer = shapes_under(f"layers.{layer}.attn.indexer.")
        assert bool(compressor) == (ratio > 0), layer
        assert bool(indexer) == (ratio == 4), layer
        if ratio:
            width = 1024 if ratio == 4 else 512
            assert compressor["ape"] == (ratio, width)
            assert compressor["wgate.weight"] == (width, CONFIG["hidden_size"])


def test_hashed_layers_have_a_table_and_the_others_a_bias() -> None:
    for layer in range(SHAPE.layers):
        gate = shapes_under(f"layers.{layer}.ffn.gate.")
        hashed = layer < CONFIG["num_hash_layers"]
        assert ("tid2eid" in gate) == hashed
        assert ("bias" in gate) != hashed


def test_draft_layers_are_window_only_and_outside_the_layer_count() -> None:
    assert len(CONFIG["compress_ratios"]) == SHAPE.layers + SHAPE.mtp
    draft = shapes_under("mtp.0.")
    assert "attn.wkv.weight" in draft
    assert not any("compressor" in name for name in draft)


def test_every_quantised_weight_is_whole_blocks() -> None:
    for spec in SPECS.values():
        if spec.quant is not Quant.NONE:
            assert all(side % 128 == 0 for side in spec.shape), spec
