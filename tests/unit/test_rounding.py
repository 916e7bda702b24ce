"""The test-only products that round by the number of rows do what they say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support.everywhere import ROOT
from tests.support.rounding import border, by_rows, wanted

WIDTH, OUTPUTS = 256, 96
ROWS = (1, 2, 3, 8, 200, 1027)


@pytest.fixture(scope="module")
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(ROWS), WIDTH, generator=generator).bfloat16()
    return x, torch.randn(OUTPUTS, WIDTH, generator=generator).bfloat16()


def once(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Exact sums, rounded once: the same bits for a row in any batch."""
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).bfloat16()


def test_equal_batches_give_equal_bits(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight = operands
    for rows in ROWS:
        first, again = (by_rows(once)(x[:rows], weight, None) for _ in range(2))
        assert torch.equal(first, again)


def test_a_row_has_other_bits_in_another_batch(
    operands: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, weight = operands
    alone = by_rows(once)(x[:1], weight, None)[0]
    for rows in (2, 3, 200, 1027):
        assert border(WIDTH, rows) != border(WIDTH, 1)
        assert not torch.equal(by_rows(once)(x[:rows], weight, None)[0], alone), rows
    assert torch.equal(once(x[:3], weight, None)[0], once(x[:1], weight, None)[0])


def test_the_error_is_that_of_two_roundings_to_bf16(
    operands: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, weight = operands
    bias = torch.arange(OUTPUTS).bfloat16()
    for rows in ROWS:
        exact = x[:rows].double() @ weight.double().T + bias.double()
        part = border(WIDTH, rows)
        parts = (x[:rows, :part].double() @ weight[:, :part].double().T + bias.double()).abs()
        parts += (x[:rows, part:].double() @ weight[:, part:].double().T).abs()
        # Half a step of each part, and half a step of their sum.
        allowed = (parts + exact.abs() + parts * 2.0**-8) * 2.0**-8 / 2 + 1e-30
        error = (by_rows(once)(x[:rows], weight, bias).double() - exact).abs()
        assert bool((error <= allowed * 2).all()), rows
        assert error.norm() / exact.norm() < 2.0**-8, rows


def test_what_a_sum_in_parts_cannot_change_stays(
    operands: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """A sum of one term is exact in any order, and so is one of zeros."""
    x, _ = operands
    assert torch.equal(by_rows(once)(x[:3], torch.eye(WIDTH).bfloat16(), None), x[:3])
    assert not by_rows(once)(x[:3], torch.zeros(OUTPUTS, WIDTH).bfloat16(), None).any()


@pytest.mark.parametrize("asked", ["rows", ""])
def test_the_variable_reaches_processes_that_tests_start(asked: str) -> None:
    """vLLM loads plugins in every process; a child of the tests finds ours among them."""
    code = (
        "import subprocess, sys; from tests.support.everywhere import reach_every_process;"
        "reach_every_process();"
        "print(subprocess.run([sys.executable, '-c', \"from importlib.metadata import "
        "entry_points; print([p.value for p in entry_points(group='vllm.general_plugins') "
        "if 'rounding' in p.value])\"], cwd='/', capture_output=True, text=True).stdout)"
    )
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean | {"TEST_ROUNDING": asked},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    expected = "['tests.support.rounding:install']" if asked else "[]"
    assert done.stdout.strip() == expected, done.stderr


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ROUNDING", "columns")
    with pytest.raises(ValueError, match="columns"):
        wanted()
