"""The released (fp8, fp4) form, with vLLM's kernels for it and without.

Those kernels need AMX. Where it is absent the checkpoint is dequantised while it loads, which must
give the bits of one that was dequantised on disk; a processor with AMX shows that too, told that it
has none. As the processor is, rings give the bits of pages: with AMX, of vLLM's quantised kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tests.support.engine import Answer, Engine, engine
from tests.support.prompts import VOCABULARY, prompt
from vllm_dsv4.checkpoint.config import Form

PROMPTS = [prompt(length) for length in (3, 130, 300)]
HAS_AMX = torch.cpu._is_amx_tile_supported()


def _answers(running: Engine, quantised_kernels: bool) -> list[Answer]:
    method = running.model.model.layers[0].attn.wq_b.quant_method
    assert isinstance(method, UnquantizedLinearMethod) != quantised_kernels, method
    return running.one_by_one(PROMPTS, max_tokens=16)


@pytest.fixture(scope="module")
def without_amx(tiny: Callable[..., Path]) -> dict[Form, list[Answer]]:
    """On rings, every processor told that it has no AMX."""
    answers = {}
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False):
        for form in (Form.RELEASED, Form.DEQUANTISED):
            with engine(tiny(form, vocab=VOCABULARY)) as running:
                quantised = running.llm.llm_engine.vllm_config.quant_config is not None
                assert quantised == (form == Form.RELEASED)
                answers[form] = _answers(running, quantised_kernels=False)
    return answers


def test_dequantised_while_loading_and_on_disk_give_the_same_bits(
    without_amx: dict[Form, list[Answer]],
) -> None:
    assert without_amx[Form.RELEASED] == without_amx[Form.DEQUANTISED]


def test_rings_give_the_bits_of_pages_with_the_kernels_of_this_processor(
    tiny: Callable[..., Path], without_amx: dict[Form, list[Answer]]
) -> None:
    rings = without_amx[Form.RELEASED]
    if HAS_AMX:
        with engine(tiny(Form.RELEASED, vocab=VOCABULARY)) as running:
            rings = _answers(running, quantised_kernels=True)
    with engine(tiny(Form.RELEASED, vocab=VOCABULARY), env={"VLLM_DSV4_RING": "0"}) as running:
        assert _answers(running, quantised_kernels=HAS_AMX) == rings
