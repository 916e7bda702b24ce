"""What the DSV4 models of all platforms share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_dsv4.checkpoint.check import OUT_OF_MEMORY, CheckedWeights, CheckpointError
from vllm_dsv4.checkpoint.expected import expected_tensors
from vllm_dsv4.ring.geometry import layer_ratios
from vllm_dsv4.settings import read_settings

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig

    from vllm_dsv4.ring.arena import RingArena


def local_ratios(attentions: Iterable[Any]) -> tuple[int, ...]:
    """Compression ratios of this rank's own layers, in construction order."""
    return tuple(
        0 if attention.compress_ratio <= 1 else int(attention.compress_ratio)
        for attention in attentions
    )


STREAMED_FORMATS = ("auto", "hf", "safetensors", "pt", "fastsafetensors", "runai_streamer")
"""Values of ``--load-format`` that load by ``load_weights``, all of it at once."""
RELEASED_METHODS = ("fp8", "deepseek_v4_fp8")
"""Quantisation methods whose tensors ``checkpoint.names`` knows. vLLM judges the others."""


class LoadsWholeCheckpoint:
    """Mixin for a model: its first load must find all that ``config.json`` asks for, and fit.

    Only the first: whoever updates the weights of a running engine sends some of them, in calls
    of his own. ``expect_checkpoint`` arms it, at the end of the constructor.
    """

    arena: RingArena
    _expected: VllmConfig | None = None
    _drafts = False

    def expect_checkpoint(self, vllm_config: VllmConfig, drafts: bool = False) -> None:
        """Check the next load. Args: drafts: this model has the draft layers, and no others."""
        if read_settings().check_checkpoint and _can_be_judged(vllm_config, drafts):
            self._expected, self._drafts = vllm_config, drafts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.arena.weights_loaded += 1
        vllm_config, self._expected = self._expected, None
        if vllm_config is None:
            return super().load_weights(weights)  # type: ignore[misc]
        checked = checked_weights(weights, vllm_config, self._drafts)
        try:
            loaded: set[str] = super().load_weights(checked)  # type: ignore[misc]
        except (CheckpointError, *OUT_OF_MEMORY):
            raise
        except Exception as error:
            raise checked.explain(error) from error
        checked.check_complete()
        checked.check_scaled((name for name, _ in self.named_parameters()), loaded)  # type: ignore[attr-defined]
        return loaded


def _can_be_judged(vllm_config: VllmConfig, drafts: bool) -> bool:
    """Whether the load streams through the model, in the naming and the formats of a release."""
    if vllm_config.load_config.load_format not in STREAMED_FORMATS:
        return False
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    if drafts and speculative and speculative.draft_model_config.model != model.model:
        return False
    quantisation = getattr(model.hf_config, "quantization_config", None) or {}
    elsewhere = getattr(model.hf_config, "compression_config", None)
    return not elsewhere and quantisation.get("quant_method", "fp8") in RELEASED_METHODS


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], vllm_config: VllmConfig, drafts: bool
) -> CheckedWeights:
    """``weights`` with the checks that this configuration calls for."""
    hf_config = vllm_config.model_config.hf_config
    expected = expected_tensors(hf_config, layer_ratios(hf_config), drafts)
    parallel = vllm_config.parallel_config
    if parallel.enable_expert_parallel and parallel.enable_ep_weight_filter:
        # vLLM leaves other ranks' experts in the file.
        expected = {name: spec for name, spec in expected.items() if ".ffn.experts." not in name}
    return CheckedWeights(
        weights,
        expected,
        quantisation=getattr(hf_config, "quantization_config", None),
        where=vllm_config.model_config.model,
        overrides=_overrides(vllm_config),
    )


def _overrides(vllm_config: VllmConfig) -> Mapping[str, object]:
    """``--hf-overrides``. vLLM's own, for drafts, are functions and ask for no other tensors."""
    overrides = vllm_config.model_config.hf_overrides
    return overrides if isinstance(overrides, dict) else {}
