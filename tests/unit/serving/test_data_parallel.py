"""Engines that could not exchange tokens are refused at the start, not at the first request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.serving.data_parallel import check_exchange, missing_exchange

VLLM = "vllm.distributed.device_communicators"


def test_vllms_communicator_of_cards_has_the_exchange_and_that_of_the_cpu_lacks_it() -> None:
    assert missing_exchange(f"{VLLM}.cuda_communicator.CudaCommunicator") == []
    lacking = missing_exchange(f"{VLLM}.cpu_communicator.CpuCommunicator")
    assert lacking == ["all_gatherv", "reduce_scatterv"]


def test_a_communicator_without_the_exchange_is_refused_for_more_than_one_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engines(count: int) -> SimpleNamespace:
        return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=count))

    check_exchange(engines(2))  # the live platform names one that has it
    monkeypatch.setattr(
        type(current_platform),
        "get_device_communicator_cls",
        classmethod(lambda cls: f"{VLLM}.cpu_communicator.CpuCommunicator"),
    )
    check_exchange(engines(1))
    with pytest.raises(Refusal, match=r"--data-parallel-size=2: .*no all_gatherv.*Set it to 1"):
        check_exchange(engines(2))
