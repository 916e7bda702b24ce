"""The stand-in for a graph: a tape that is run again on the tensors that it captured."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from vllm_dsv4.commands.rehearse import graph
from vllm_dsv4.commands.rehearse.graph import Graph, Tapes, _capturing, _noting, _Recorder


@pytest.fixture(autouse=True)
def tapes() -> Iterator[Tapes]:
    found = Tapes()
    with patch.object(graph, "TAPES", found), _Recorder({}):
        yield found


def test_a_replay_computes_from_what_lies_in_the_captured_tensors() -> None:
    given, captured = torch.ones(3), Graph()
    with _capturing(captured):
        made = (given * 2).clamp(max=5)[1:] + 1
    given.fill_(2)
    captured.replay()
    assert made.tolist() == [5, 5]


def test_what_python_read_at_capture_is_frozen_and_told(tapes: Tapes) -> None:
    given, captured = torch.ones(3), Graph()
    with _capturing(captured):
        made = given * given[0].item()
    given.fill_(3)
    captured.replay()
    assert made.tolist() == [3, 3, 3]
    (read,) = tapes.host_reads
    assert read.startswith("aten::_local_scalar_dense at ")
    assert "test_graph.py" in read


def test_a_tensor_made_anew_is_not_the_one_that_was_captured() -> None:
    given, captured = torch.ones(3), Graph()
    with _capturing(captured):
        made = given + 1
    given = torch.full((3,), 7.0)
    captured.replay()
    assert made.tolist() == [2, 2, 2]


def test_a_shape_that_depends_on_values_is_told(tapes: Tapes) -> None:
    with _capturing(Graph()):
        torch.ones(3).nonzero()
    assert [read.split(" at ")[0] for read in tapes.host_reads] == ["aten::nonzero"]


def test_a_read_without_an_operator_is_told(tapes: Tapes) -> None:
    method = _noting("tolist", torch.Tensor.tolist)
    method(torch.ones(1))
    assert tapes.host_reads == []
    with _capturing(Graph()):
        method(torch.ones(1))
    assert [read.split(" at ")[0] for read in tapes.host_reads] == ["Tensor.tolist"]


def test_reads_outside_a_capture_are_nobodys_business(tapes: Tapes) -> None:
    assert torch.ones(1).item() == 1
    assert tapes.host_reads == []


def test_results_that_lie_elsewhere_are_put_where_they_were(tapes: Tapes) -> None:
    """An operator that allocates gives a replay new memory; later entries read the old."""
    given, captured = torch.arange(4.0), Graph()
    with _capturing(captured):
        total = given.sum()
        made = total * 2
    given.add_(1)
    captured.replay()
    assert (float(total), float(made)) == (10, 20)
    assert tapes.replayed == tapes.captured == 1
