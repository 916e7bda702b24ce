"""Every feature of the API on rings and on the paged path, one server each."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.clients.absurd import absurd_cells
from tests.clients.asking import ask_all
from tests.clients.cells import Cell, cells
from tests.clients.document import Verdict, absurd_lines, document, verdict
from tests.support.served import Served
from tests.support.server import ROOT

DOCUMENT = ROOT / "docs" / "clients.md"


def _asked(both: tuple[Served, Served], asked: list[Cell]) -> list[Verdict]:
    with ThreadPoolExecutor(2) as pool:
        rings, paged = pool.map(lambda one: ask_all(one.running.url, asked), both)
    return [verdict(r, p) for r, p in zip(rings, paged, strict=True)]


@pytest.fixture(scope="module")
def features(both: tuple[Served, Served]) -> list[Verdict]:
    return _asked(both, cells())


@pytest.fixture(scope="module")
def absurd(both: tuple[Served, Served]) -> list[Verdict]:
    return _asked(both, absurd_cells())


def _faults(asked: list[Cell], found: list[Verdict]) -> list[str]:
    return [
        f"{cell.group}, {cell.name}, {cell.where}: {one.fault}"
        for cell, one in zip(asked, found, strict=True)
        if one.fault
    ]


def test_every_feature_is_answered_as_on_the_paged_path_or_refused(
    features: list[Verdict],
) -> None:
    assert _faults(cells(), features) == []


def test_absurd_values_are_answered_as_on_the_paged_path(absurd: list[Verdict]) -> None:
    assert _faults(absurd_cells(), absurd) == []


def test_nothing_is_held_afterwards_and_the_server_still_answers(
    both: tuple[Served, Served], features: list[Verdict], absurd: list[Verdict]
) -> None:
    rings, _ = both
    rings.wait_until_idle()
    answer = rings.client.completions.create(model="dsv4", prompt="again", max_tokens=2)
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_the_document_says_what_was_found(features: list[Verdict], absurd: list[Verdict]) -> None:
    found = document(cells(), features, absurd_lines(absurd_cells(), absurd))
    if os.environ.get("CLIENTS_DOC") == "write":
        DOCUMENT.write_text(found)
    assert DOCUMENT.read_text() == found
