"""Drafts that rings do not serve are refused when the configuration is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.serving.test_refusals import config
from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.serving.refusals import DRAFTS_WITHOUT_A_MODEL, check_speculation


def drafting(method: str, **hf: Any) -> Any:
    """A configuration with this speculation, its draft's config.json holding ``hf``."""
    return config(
        speculative_config=SimpleNamespace(
            method=method,
            use_dspark=lambda: method == "dspark",
            draft_model_config=SimpleNamespace(model="a/draft", hf_config=SimpleNamespace(**hf)),
        )
    )


OTHERS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark", "new")


@pytest.mark.parametrize("method", ["mtp", *DRAFTS_WITHOUT_A_MODEL])
def test_drafts_that_are_served_pass(method: str) -> None:
    check_speculation(drafting(method, num_nextn_predict_layers=1))


@pytest.mark.parametrize("method", OTHERS)
def test_every_other_method_is_refused_with_those_that_are_served(method: str) -> None:
    with pytest.raises(Refusal, match=f"method={method}: .*Use mtp or ngram"):
        check_speculation(drafting(method, num_nextn_predict_layers=1))


@pytest.mark.parametrize("hf", [{}, {"num_nextn_predict_layers": 0}])
def test_draft_layers_that_the_checkpoint_lacks_are_refused(hf: dict[str, int]) -> None:
    with pytest.raises(Refusal, match=r"method=mtp: a/draft has no draft layers.*Use ngram"):
        check_speculation(drafting("mtp", **hf))
