"""What the dashboard and the alerts ask of a server's metrics, read from their own files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "vllm-dsv4.json"
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"

OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus gives to everything that it scrapes."""
BY_PROMETHEUS = {"up": frozenset(OF_PROMETHEUS)}
"""Metrics that it makes itself, with their labels."""
GRAFANAS_WORDS = {"$__rate_interval": "5m"}
LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


class Use(NamedTuple):
    """A metric, and the labels by which an expression selects, groups or matches it."""

    metric: str
    labels: frozenset[str]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def rules() -> list[dict[str, Any]]:
    """Every rule of every group."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    """The expressions of all panels, with the words that only Grafana knows replaced."""
    targets = [t for panel in dashboard()["panels"] for t in panel.get("targets", [])]
    return [_plain(target["expr"]) for target in targets]


def _plain(expression: str) -> str:
    for word, value in GRAFANAS_WORDS.items():
        expression = expression.replace(word, value)
    return expression


def all_uses() -> set[Use]:
    """What the dashboard's panels and variables and the alerts name."""
    found = {use for query in dashboard_queries() for use in uses(query)}
    found |= {use for rule in rules() for use in uses(rule["expr"])}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            asked = LABEL_VALUES.fullmatch(variable["query"])
            assert asked, variable["query"]
            for use in uses(asked["selector"]):
                found.add(Use(use.metric, use.labels | {asked["label"]}))
    return found


def uses(query: str) -> Iterator[Use]:
    """Raises ValueError for what is no PromQL."""
    yield from _uses(promql.parse(query), frozenset())


def _uses(part: promql.Expr, labels: frozenset[str]) -> Iterator[Use]:
    match part:
        case promql.VectorSelector():
            matched = {matcher.name for matcher in part.matchers.matchers}
            yield Use(part.name, labels | matched)
        case promql.MatrixSelector():
            yield from _uses(part.vector_selector, labels)
        case promql.AggregateExpr():
            # What an outer part names must have been kept by this one, so it is named here too.
            grouped = frozenset(part.modifier.labels) if part.modifier else frozenset[str]()
            yield from _uses(part.expr, grouped)
        case promql.BinaryExpr():
            matching = part.modifier.matching if part.modifier else None
            joined = labels | frozenset(matching.labels if matching else ())
            yield from _uses(part.lhs, joined)
            yield from _uses(part.rhs, joined)
        case promql.Call():
            for argument in part.args:
                yield from _uses(argument, labels)
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from _uses(part.expr, labels)
        case promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            raise NotImplementedError(type(part))
