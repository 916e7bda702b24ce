"""The dashboard and the alerts: what can be told without a server.

``tests/engine/test_serving.py`` holds every metric and label that they name against a server's own.
No Grafana has drawn the dashboard here: it is read with the types that Grafana publishes.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support.compose import services
from tests.support.monitoring import (
    RULES,
    Use,
    all_uses,
    dashboard,
    dashboard_queries,
    rules,
    uses,
)
from vllm_dsv4.serving.metrics import COUNTERS, HELP, PREFIX

RULES_TEST = RULES.with_name("rules_test.yaml")
CONFIG = RULES.with_name("prometheus.yaml")


def as_grafana_knows(found: dict[str, Any]) -> dict[str, Any]:
    """What is left of a dashboard once it has been read into Grafana's types."""
    plugins.register_default_plugins()
    known: dict[str, Any] = json.loads(JSONEncoder().encode(Dashboard.from_json(found)))
    return known


def fields(value: Any, at: str = "") -> set[str]:
    """Every field and scalar of a JSON value, by its path."""
    if isinstance(value, dict):
        return {p for key in value for p in fields(value[key], f"{at}/{key}")}
    if isinstance(value, list):
        return {p for i, entry in enumerate(value) for p in fields(entry, f"{at}[{i}]")}
    return {f"{at}={value!r}"}


def test_grafanas_types_know_every_field_of_the_dashboard() -> None:
    found = dashboard()
    assert fields(found) - fields(as_grafana_knows(copy.deepcopy(found))) == set()


def test_a_field_that_grafana_does_not_know_is_seen() -> None:
    found = dashboard()
    found["panels"][1]["options"]["colour"] = "red"
    known = as_grafana_knows(copy.deepcopy(found))
    assert fields(found) - fields(known) == {"/panels[1]/options/colour='red'"}


def test_panels_lie_beside_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} over {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_every_panel_says_what_it_shows_and_has_its_own_number() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


def test_all_metrics_of_the_plugin_are_on_the_dashboard() -> None:
    shown = {use.metric for query in dashboard_queries() for use in uses(query)}
    ours = {f"{PREFIX}{name}{'_total' * (name in COUNTERS)}" for name in HELP}
    assert ours - shown == set()


def test_labels_are_found_wherever_an_expression_names_them() -> None:
    query = 'sum by (le) (rate(a{b="c"}[5m])) / on (d) up unless on (e) (f > 0)'
    assert set(uses(query)) == {
        Use("a", frozenset({"le", "b"})),
        Use("up", frozenset({"d", "e"})),
        Use("f", frozenset({"e"})),
    }


def test_what_is_no_promql_is_refused() -> None:
    with pytest.raises(ValueError):
        list(uses("sum by (rate(a[5m])"))


def test_every_alert_says_for_how_bad_what_it_is_and_what_to_do() -> None:
    assert len(all_uses()) > 20
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_job_of_the_alerts_is_the_one_that_prometheus_scrapes_in_the_compose_file() -> None:
    (scraped,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    assert all(f'job="{scraped["job_name"]}"' in r["expr"] for r in rules() if "up{" in r["expr"])
    (target,) = scraped["static_configs"][0]["targets"]
    host, port = target.split(":")
    for server in ("cpu", "rocm"):
        service = services()[server]
        assert host in service["networks"]["default"]["aliases"]
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = RULES_TEST.read_text()
    assert [rule["alert"] for rule in rules() if rule["alert"] not in cases] == []


@pytest.mark.parametrize(
    "command",
    [("check", "rules", RULES), ("test", "rules", RULES_TEST), ("check", "config", CONFIG)],
    ids=lambda command: " ".join(map(str, command[:2])),
)
def test_prometheus_own_tool_passes_it(command: tuple[str | Path, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip(
            "not checked: promtool (Debian's package prometheus) is not installed, so nothing here "
            "tells when alerts fire; their syntax and names are checked all the same"
        )
    done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
