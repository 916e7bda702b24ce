"""``vllm-dsv4 verify``: its checks pass where kernels are right, and fail where they are not."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm_dsv4.kernels.decode import decode

from vllm_dsv4.commands.verify import attention, device, run, speed, writes
from vllm_dsv4.commands.verify.device import Card, NoDevice, find_card
from vllm_dsv4.commands.verify.inputs import Inputs
from vllm_dsv4.commands.verify.report import Report
from vllm_dsv4.commands.verify.result import Result, relative
from vllm_dsv4.commands.verify.speed import Speed, vllm_decode

INTERPRETED = Card(torch.device("cpu"), "no card", "gfx942", 1, 1 << 30, torch.float8_e4m3fnuz)


def verify_here(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "vllm_dsv4.commands.cli.main",
            "verify",
            "--out",
            str(folder / "report.md"),
        ],
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_card_it_says_what_is_needed(tmp_path: Path) -> None:
    done = verify_here(tmp_path)
    assert done.returncode == 2
    assert "is a CPU build. Needed: an AMD card (gfx942, gfx950, gfx1250)" in done.stderr
    assert not (tmp_path / "report.md").exists()


def test_under_the_interpreter_it_refuses(tmp_path: Path) -> None:
    done = verify_here(tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET=1 runs kernels in Python" in done.stderr


def test_a_build_for_cards_without_one_says_so() -> None:
    with patch.object(torch.version, "hip", "7.0"), pytest.raises(NoDevice, match="no card is"):
        find_card()


@pytest.mark.parametrize(
    ("hip", "arch", "fp8"),
    [
        ("7.0", "gfx942", torch.float8_e4m3fnuz),
        ("7.0", "gfx950", torch.float8_e4m3fn),
        (None, "sm90", torch.float8_e4m3fn),
    ],
)
def test_a_card_is_known_by_its_architecture(hip: str | None, arch: str, fp8: torch.dtype) -> None:
    class Properties:
        gcnArchName = f"{arch}:sramecc+:xnack-"
        name, major, minor = "card", 9, 0
        multi_processor_count, total_memory = 304, 192 << 30

    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_properties", lambda _: Properties),
        patch.object(device.torch.version, "hip", hip),
    ):
        card = find_card()
    assert (card.arch, card.fp8, card.is_supported) == (arch, fp8, arch != "sm90")


@pytest.mark.parametrize(
    "checks",
    [
        lambda: writes.check_keys(INTERPRETED),
        lambda: writes.check_compressors(INTERPRETED),
        lambda: attention.check_prefill(INTERPRETED, (1,)),
        lambda: attention.check_decode(INTERPRETED, (20,)),
    ],
    ids=["keys", "compressors", "prefill", "decode"],
)
def test_the_checks_pass_under_the_interpreter(
    checks: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CHUNKS", ((0, 1), (127, 3), (300, 4)))
    monkeypatch.setattr(attention, "POSITIONS", (0, 127, 129))
    monkeypatch.setattr(attention, "LENGTHS", (0, 33, 63))
    results = list(checks())
    assert results
    assert [one for one in results if not one.passed] == []


def test_a_kernel_that_is_wrong_or_raises_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any, out: torch.Tensor, **_: Any) -> None:
        out.fill_(1.0)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(attention, "decode", shifted)
    monkeypatch.setattr(attention, "prefill", broken)
    monkeypatch.setattr(run, "check_keys", lambda _: iter(()))
    monkeypatch.setattr(run, "check_compressors", lambda _: iter(()))
    told: list[str] = []
    results = run.check_kernels(INTERPRETED, (1,), told.append)
    assert results and not any(one.passed for one in results)
    assert results[0].error == math.inf and "out of resources" in results[0].note
    assert told == [
        "keys and rings: 0 of 0 passed",
        "compressors: 0 of 0 passed",
        "prefill: 0 of 1 passed",
        "decode: 0 of 8 passed",
    ]
    with patch.object(run, "check_kernels", lambda *_, **__: results):
        report = run.verify(INTERPRETED, told.append)
    assert report.copy_gb_per_s is None
    assert "Not measured: a kernel is wrong" in report.markdown()


def test_vllms_kernel_is_timed_on_the_same_rows() -> None:
    inputs = Inputs(INTERPRETED.device, seed=4)
    ring = inputs.rings_at([300, 301], 128, torch.float8_e4m3fn)
    compressed = inputs.compressed([64, 64], 64, torch.float8_e4m3fn)
    compressed.indices[:, 4::5] = compressed.indices[:, :1]
    queries, sink = inputs.normal(2, 16, 512).bfloat16(), inputs.normal(16)
    slots, out = inputs.integers([1, 2]), torch.empty_like(queries)
    launch = vllm_decode(queries, ring, slots, compressed, sink, attention.SCALE, out)
    assert launch is not None
    with patch.object(torch.Tensor, "is_cpu", False):
        launch()
    positions = inputs.integers([300, 301], torch.int64)
    options = {"scale": attention.SCALE, "sink": sink, "compressed": compressed}
    assert relative(out, decode(queries, ring, slots, positions, **options)) < 0.005


def test_every_shape_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(launch: Callable[[], object]) -> float:
        launch()
        return 2.0

    monkeypatch.setattr(speed, "microseconds", once)
    monkeypatch.setattr(speed, "vllm_decode", lambda *_: None)
    monkeypatch.setattr(speed, "HEADS", (16,))
    monkeypatch.setattr(speed, "BATCHES", (1,))
    monkeypatch.setattr(speed, "COMPRESSED", (0, 64))
    found = list(speed.measure_decode(INTERPRETED))
    assert [(one.batch, one.heads, one.compressed) for one in found] == [(1, 16, 0), (1, 16, 64)]
    assert found[0].gb_per_s == pytest.approx((128 * 584 + 2 * 16 * 1024 + 12) / 2000)
    assert found[0].ours_us == 2.0 and found[0].vllm_us is None


def test_the_report_holds_every_figure() -> None:
    results = [
        Result("decode", "16 heads", 0.0017, 0.002, "of the norm"),
        Result("prefill", "16 heads", 0.5, 0.002, "of the norm"),
    ]
    speeds = [Speed(128, 16, 512, 50.0, 2000.0, 75.0), Speed(1, 16, 0, 10.0, 10.0, None)]
    text = Report(INTERPRETED, results, 4000.0, speeds, "One was not timed.").markdown()
    assert "1 of 2 checks passed on no card" in text
    assert "| prefill | 16 heads | 0.5 | 0.002 | of the norm | FAILED |" in text
    assert "| 128 | 16 | 512 | 50.0 | 2000 | 50% | 75.0 | 1.50 |" in text
    assert "| 1 | 16 | 0 | 10.0 | 10 | 0% | - | - |" in text
    assert "gfx942" in text and "One was not timed." in text
