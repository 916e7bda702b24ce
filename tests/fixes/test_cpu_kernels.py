"""Our versions of vLLM's metadata kernels stand in only where vLLM has none of its own."""

from __future__ import annotations

import pytest
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import HAS_TRITON, dispatcher

from vllm_dsv4.cpu.metadata_kernels import KERNELS
from vllm_dsv4.cpu.platform import Dsv4CpuPlatform


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are registered during the test, which itself changes nothing."""
    assert not HAS_TRITON, "this process must not run under TRITON_INTERPRET"
    names: list[str] = []
    monkeypatch.setattr(dispatcher, "register_kernels", lambda kernels: names.extend(kernels))
    return names


def test_vllm_still_needs_them(registered: list[str]) -> None:
    CpuPlatform.register_triton_kernel_overrides()
    assert registered, "vLLM registers its own some other way: read the hook again"
    own = sorted(set(registered) & KERNELS.keys())
    assert not own, f"vLLM has its own version of {own}: remove ours"


def test_our_platform_adds_them_to_vllms(registered: list[str]) -> None:
    CpuPlatform.register_triton_kernel_overrides()
    of_vllm = list(registered)
    registered.clear()
    Dsv4CpuPlatform.register_triton_kernel_overrides()
    assert registered == [*of_vllm, *KERNELS]
