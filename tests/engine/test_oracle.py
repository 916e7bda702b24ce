"""Against transformers' own DeepSeek-V4 in float32: rings err no more than the paged path does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine import Engine, engine
from tests.support.prompts import prompt

LENGTHS = (130, 420)
Outputs = dict[str, torch.Tensor]


def _hooked(running: Engine, tokens: list[int]) -> Outputs:
    """Outputs of every layer for one prompt, prefilled in one step, and the last logits."""
    found: Outputs = {}

    def keep(name: str):
        def hook(module: object, args: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if first.shape[0] == len(tokens):
                found[name] = first.float().clone()

        return hook

    model = running.model.model
    handles = [
        layer.register_forward_hook(keep(f"layer {i}")) for i, layer in enumerate(model.layers)
    ]
    # vLLM's compile decorator calls the inner model past its hooks.
    handles.append(running.model.register_forward_hook(keep("hidden")))
    try:
        running.generate([tokens], max_tokens=1)
    finally:
        for handle in handles:
            handle.remove()
    found["logits"] = found["hidden"] @ running.model.lm_head.weight.float().T
    return found


def _transformers(model: Path, tokens: list[int]) -> Outputs:
    from transformers import DeepseekV4ForCausalLM

    oracle = DeepseekV4ForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: Outputs = {}
    for index, layer in enumerate(oracle.model.layers):
        layer.register_forward_hook(
            lambda module, args, output, index=index: found.update({f"layer {index}": output[0]})
        )
    with torch.inference_mode():
        output = oracle.model(torch.tensor([tokens]))
        found["hidden"] = output.last_hidden_state[0]
        found["logits"] = oracle.lm_head(found["hidden"])
    return found


def _errors(found: Outputs, exact: Outputs) -> dict[str, float]:
    """Relative error of every output, in the Euclidean norm."""
    return {
        name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact
    }


@pytest.fixture(scope="module")
def errors(model: Path) -> dict[tuple[str, int], dict[str, float]]:
    prompts = {length: prompt(length) for length in LENGTHS}
    exact = {length: _transformers(model, tokens) for length, tokens in prompts.items()}
    found = {}
    for path, ring in (("rings", "1"), ("paged", "0")):
        with engine(model, env={"VLLM_DSV4_RING": ring}) as running:
            for length, tokens in prompts.items():
                found[path, length] = _errors(_hooked(running, tokens), exact[length])
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_rings_err_no_more_than_pages(errors, length: int) -> None:
    rings, paged = errors["rings", length], errors["paged", length]
    assert set(rings) == {f"layer {i}" for i in range(5)} | {"hidden", "logits"}
    for name, error in rings.items():
        assert error <= paged[name], name


@pytest.mark.parametrize("length", LENGTHS)
def test_the_window_layers_agree_with_float32_to_bf16_precision(errors, length: int) -> None:
    """Keys are fp8 and products bf16: about a percent a layer. A wrong row costs all of it."""
    for index in range(2):
        assert errors["rings", length][f"layer {index}"] < 0.03
