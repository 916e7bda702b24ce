"""Ranks that share the experts compute what one rank with all of them does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from vllm_dsv4.fixes.cpu_expert_map import mapped

EXPERTS, HIDDEN, WIDTH, TOKENS, CHOSEN = 6, 64, 32, 9, 3
HALVES = (slice(0, 2), slice(2, 6))


def vllms(experts: type[Any]) -> Any:
    """As vLLM has it, also where the fix is installed in this process."""
    return getattr(experts.apply, "__wrapped__", experts.apply)


def numbers(own: slice) -> torch.Tensor:
    found = torch.full((EXPERTS,), -1)
    found[own] = torch.arange(len(found[own]))
    return found


@pytest.mark.parametrize(
    ("experts", "operator", "ids"),
    [
        (cpu_moe.CPUUnquantizedExperts, "cpu_fused_moe", 7),
        (cpu_moe.CPUExpertsMxfp4, "fused_experts_cpu", 5),
    ],
)
def test_vllm_still_needs_it(
    experts: type[Any], operator: str, ids: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(cpu_moe, operator, lambda *given: asked.append(given[ids]))
    chosen = torch.tensor([[5, 1]])
    vllms(experts)(
        SimpleNamespace(
            _use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec", w1_scale=None,
            w2_scale=None, quant_config=SimpleNamespace(w1_bias=None, w2_bias=None),
        ),
        topk_ids=chosen, topk_weights=None, expert_map=numbers(HALVES[1]), output=None,
        hidden_states=None, w1=None, w2=None, activation=SimpleNamespace(value="silu"),
        global_num_experts=EXPERTS, a1q_scale=None, a2_scale=None, workspace13=None,
        workspace2=None, expert_tokens_meta=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    assert asked[0] is chosen, "vLLM maps the experts: remove the fix"


def test_the_parts_of_two_ranks_add_up_to_the_whole() -> None:
    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) / 8).bfloat16()

    x, w13, w2 = 8 * tensor(TOKENS, HIDDEN), *(
        tensor(EXPERTS, 2 * WIDTH, HIDDEN), tensor(EXPERTS, HIDDEN, WIDTH),
    )  # fmt: skip
    weights = torch.rand(TOKENS, CHOSEN, generator=random)
    ids = torch.stack([torch.randperm(EXPERTS, generator=random) for _ in range(TOKENS)])
    ids = ids[:, :CHOSEN].int()

    def computed(own: slice, expert_map: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        mapped(vllms(cpu_moe.CPUUnquantizedExperts))(
            SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec"),
            topk_ids=ids, topk_weights=weights, expert_map=expert_map, output=out,
            hidden_states=x, w1=cpu_prepack_moe_weight(w13[own].contiguous(), "vec"),
            w2=cpu_prepack_moe_weight(w2[own].contiguous(), "vec"),
            activation=SimpleNamespace(value="silu"), global_num_experts=EXPERTS, a1q_scale=None,
            a2_scale=None, workspace13=None, workspace2=None, expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return out.float()

    whole = computed(slice(0, EXPERTS), None)
    parts = [computed(own, numbers(own)) for own in HALVES]
    assert min(part.norm() for part in parts) > 0.1 * whole.norm()
    assert (sum(parts) - whole).norm() < 0.02 * whole.norm()
