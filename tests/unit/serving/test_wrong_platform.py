"""Where our platform did not take effect, and what it tells vLLM where it did."""

from __future__ import annotations

import pytest

from vllm_dsv4.serving.live import WrongPlatformError, require_our_platform


def test_the_model_refuses_a_platform_that_would_not_plan_its_rings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(vllm.platforms, "_current_platform", CpuPlatform())
    with pytest.raises(WrongPlatformError, match=r"CpuPlatform.*VLLM_PLUGINS.*doctor"):
        require_our_platform()


def test_it_is_built_on_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    from vllm_dsv4.cpu.platform import Dsv4CpuPlatform

    monkeypatch.setattr(vllm.platforms, "_current_platform", Dsv4CpuPlatform())
    require_our_platform()


def test_vllm_knows_our_variables_and_still_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_dsv4.cpu.platform import Dsv4CpuPlatform

    monkeypatch.setenv("VLLM_DSV4_SLOTS", "4")
    Dsv4CpuPlatform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_DSV4_SLOTTS", "4")
    with pytest.raises(ValueError, match="VLLM_DSV4_SLOTTS"):
        Dsv4CpuPlatform.validate_environ(hard_fail=True)
