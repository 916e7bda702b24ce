"""The released (fp8, fp4) form gives the tokens of its weights dequantised on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.engine import engine
from tests.support.prompts import prompt

PROMPTS = [prompt(length) for length in (3, 130, 300)]


def test_released_and_dequantised_on_disk_give_the_same_bits(tiny: Callable[..., Path]) -> None:
    answers = {}
    for form in ("released", "dequantised"):
        with engine(tiny(form)) as running:
            quantised = running.llm.llm_engine.vllm_config.quant_config is not None
            assert quantised == (form == "released")
            answers[form] = running.one_by_one(PROMPTS, max_tokens=16)
    assert answers["released"] == answers["dequantised"]
