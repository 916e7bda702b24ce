"""What the ROCm platform refuses at start-up, each with what is supported."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.spec_decode.eagle import EagleProposer

from tests.rocm.rig import make_config
from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.rocm.backend import RocmRingMetadata
from vllm_dsv4.rocm.checks import check_card, check_context, check_triton
from vllm_dsv4.rocm.platform import Dsv4RocmPlatform


@pytest.fixture(scope="module")
def config(tiny) -> Any:
    return make_config(tiny())


@pytest.mark.parametrize("arch", ["gfx942", "gfx942:sramecc+:xnack-", "gfx950", "gfx1250"])
def test_a_card_that_the_kernels_are_made_for_passes(arch: str) -> None:
    check_card(arch)


@pytest.mark.parametrize("arch", ["gfx90a:sramecc+:xnack-", "gfx1100", "gfx1201", "gfx9420", ""])
def test_another_card_is_refused_with_those_that_are_supported(arch: str) -> None:
    with pytest.raises(Refusal, match="gfx942, gfx950, gfx1250") as refused:
        check_card(arch)
    assert repr(refused.value.value) == repr(arch)
    assert "VLLM_DSV4_RING=0" in str(refused.value)


def test_missing_triton_is_refused() -> None:
    with (
        patch("vllm_dsv4.rocm.checks.find_spec", lambda _: None),
        pytest.raises(Refusal, match=r"python package triton=missing.*VLLM_DSV4_RING=0"),
    ):
        check_triton()


@pytest.mark.parametrize("arch", ["gfx942:sramecc+:xnack-", "gfx1250"])
@pytest.mark.parametrize(("installed", "said"), [(False, "missing"), (True, "switched off")])
def test_a_card_whose_indexer_is_aiters_is_refused_without_it(
    config: Any, arch: str, installed: bool, said: str
) -> None:
    """vLLM itself says so only when all weights are loaded."""
    with (
        patch("vllm.platforms.rocm._GCN_ARCH", arch),
        patch("vllm.platforms.rocm._ON_GFX950", False),
        patch(
            "vllm_dsv4.rocm.checks.find_spec", lambda name: (installed or name != "aiter") or None
        ),
        pytest.raises(Refusal, match=rf"VLLM_ROCM_USE_AITER=0: on {arch[:6]}.*{said}.*to 1"),
    ):
        Dsv4RocmPlatform.check_and_update_config(config)


def test_a_card_whose_indexer_is_aiters_passes_with_it(config: Any) -> None:
    with (
        patch("vllm.platforms.rocm._GCN_ARCH", "gfx942"),
        patch("vllm.platforms.rocm._ON_GFX950", False),
        patch("vllm._aiter_ops.rocm_aiter_ops.is_enabled", lambda: True),
    ):
        Dsv4RocmPlatform.check_and_update_config(config)


def test_vllms_indexer_still_needs_aiter_on_other_cards() -> None:
    """Once it does not, ``check_indexer`` can go."""
    import inspect

    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    source = inspect.getsource(SparseAttnIndexer.forward_hip)
    asked = ("rocm_aiter_ops.is_enabled()", "is_rdna_aiter_enabled()", "on_gfx11()", "on_gfx950()")
    assert all(name in source for name in asked)
    assert "requires AITER" in source


def test_a_context_shorter_than_the_window_is_refused(config: Any) -> None:
    with (
        patch.object(config.model_config, "max_model_len", 100),
        pytest.raises(Refusal, match=r"--max-model-len=100.*Set it to 128 or more"),
    ):
        check_context(config)


def test_the_platform_checks_the_card_only_for_dsv4_on_rings(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with patch("vllm.platforms.rocm._GCN_ARCH", "gfx90a"):
        with pytest.raises(Refusal, match="GPU architecture=gfx90a"):
            Dsv4RocmPlatform.check_and_update_config(config)
        with patch.object(config.model_config.hf_config, "architectures", ["LlamaForCausalLM"]):
            Dsv4RocmPlatform.check_and_update_config(config)
        monkeypatch.setenv("VLLM_DSV4_RING", "0")
        Dsv4RocmPlatform.check_and_update_config(config)


def test_a_supported_configuration_passes(config: Any) -> None:
    Dsv4RocmPlatform.check_and_update_config(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e5m2", "nvfp4"])
def test_another_kv_cache_type_is_refused_with_those_that_are_supported(
    config: Any, dtype: str
) -> None:
    with (
        patch.object(config.cache_config, "cache_dtype", dtype),
        pytest.raises(Refusal, match=f"--kv-cache-dtype={dtype}.*fp8_ds_mla"),
    ):
        Dsv4RocmPlatform.check_and_update_config(config)


@pytest.mark.parametrize(("runner", "drafts"), [("0", 1), ("0", 2), ("1", 2)])
def test_several_drafts_of_a_draft_layer_are_refused_on_the_first_runner(
    tiny, monkeypatch: pytest.MonkeyPatch, runner: str, drafts: int
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    config = make_config(tiny(mtp=1), drafts=drafts, method="mtp")
    if (runner, drafts) != ("0", 2):
        Dsv4RocmPlatform.check_and_update_config(config)
        return
    with pytest.raises(Refusal, match=r"num_speculative_tokens=2: .*VLLM_USE_V2_MODEL_RUNNER"):
        Dsv4RocmPlatform.check_and_update_config(config)


def test_the_first_runner_still_lists_the_metadata_of_a_second_draft_step(tiny) -> None:
    """Once it does not, the refusal above can go."""
    config = make_config(tiny(mtp=1), drafts=2, method="mtp")
    # Another model's metadata, whose module imports packages that are not installed here.
    other = "vllm.models.minimax_m3.common.sparse_attention"
    stub = SimpleNamespace(MiniMaxM3SparseMetadata=type("MiniMaxM3SparseMetadata", (), {}))
    with (
        patch.object(type(current_platform), "is_rocm", lambda _: True),
        patch.dict(sys.modules, {other: stub}),
    ):
        allowed = EagleProposer(config, torch.device("cpu")).allowed_attn_types
    assert allowed and not issubclass(RocmRingMetadata, allowed)
