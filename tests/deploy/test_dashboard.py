"""The dashboard and the alerts name metrics, labels and values that weft's page has."""

from __future__ import annotations

import re

import pytest
import yaml
from metrics_named import (
    DEPLOY,
    Selector,
    alert_queries,
    annotation_queries,
    dashboard,
    grouped_by,
    panel_queries,
    selectors,
    variable_queries,
)
from prometheus_client.parser import text_string_to_metric_families

from weft.core.errors import WeftError
from weft.core.types import ServiceClass
from weft.ring.model_board import ModelRow
from weft.server.counts import Use
from weft.server.metric_families import ENGINE_METRICS, OWN_METRICS
from weft.server.metrics import Metrics
from weft.server.model_metrics import model_families
from weft.server.probe import NoProbe

OF_PROMETHEUS = {"instance", "job"}
CLASSES = [ServiceClass("interactive", 1, ttft_s=1.0, tpot_s=0.1), ServiceClass("batch", 3)]
QUERIES = [*panel_queries(), *alert_queries(), *annotation_queries(), *variable_queries()]


class Telling(NoProbe):
    """An engine that tells all that one can."""

    def gauges(self) -> dict[str, float]:
        return dict.fromkeys([*ENGINE_METRICS, *OWN_METRICS], 1.0)

    def policy(self) -> str:
        return "slo"


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, set[str]]]:
    """Values of each label of each metric, as the page has them once there was traffic."""
    metrics = Metrics("model", Telling(), classes=CLASSES)
    metrics.judge("interactive", 0.5, 0.05)
    metrics.rejected["queue_full"] += 1
    metrics.use("key", "batch", Use(1, 2, 3))
    found: dict[str, dict[str, set[str]]] = {"up": {}}
    page = metrics.render().decode()
    for family in [
        *text_string_to_metric_families(page),
        *model_families({"model": ModelRow(state="failed", starts=1, wake_s=1.0)}),
    ]:
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def faults(query: str, known: dict[str, dict[str, set[str]]]) -> list[str]:
    """What a query names that is not there."""
    named = selectors(query)
    found = [f"there is no metric {each.metric}" for each in named if each.metric not in known]
    there = [each for each in named if each.metric in known]
    for each in there:
        found += wrong_matchers(each, known[each.metric])
    labels = OF_PROMETHEUS.union(*(known[each.metric] for each in there))
    return found + [f"nothing has the label {label}" for label in grouped_by(query) - labels]


def wrong_matchers(selector: Selector, labels: dict[str, set[str]]) -> list[str]:
    found = []
    for label, _, value in selector.matchers:
        if label in OF_PROMETHEUS or value.startswith("$"):
            known_label = label in OF_PROMETHEUS or label in labels
            found += [] if known_label else [f"{selector.metric} has no label {label}"]
        elif label not in labels:
            found.append(f"{selector.metric} has no label {label}")
        else:
            values = labels[label] | (VALUES[label]() if label in VALUES else set())
            odd = set(value.split("|")) - values
            found += [f"{label} of {selector.metric} is never {word}" for word in sorted(odd)]
    return found


def codes() -> set[str]:
    """Of all errors."""
    waiting, found = [WeftError], set()
    while waiting:
        kind = waiting.pop()
        found.add(kind.code)
        waiting += kind.__subclasses__()
    return found


def default_classes() -> set[str]:
    from weft.core.types import DEFAULT_CLASSES

    return {row.name for row in DEFAULT_CLASSES}


VALUES = {"reason": codes, "service_class": default_classes}


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=lambda word: word[:30])
def test_what_a_query_names_is_there(title, query, known):
    assert selectors(query), f"{title} asks for nothing"
    assert faults(query, known) == []


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("weft:time_to_first_tokens_seconds_bucket", "no metric"),
        ('weft:slo_targets_total{target="ttff"}', "never ttff"),
        ('weft:request_rejected_total{reason=~"queue_full|queue_fool"}', "never queue_fool"),
        ('weft:num_requests_running{service_class="batch"}', "no label service_class"),
        ("sum by (tier) (weft_slo_attainment)", "the label tier"),
    ],
)
def test_what_is_not_there_is_found(query, words, known):
    (fault,) = faults(query, known)
    assert words in fault


def test_panels_have_names_places_and_the_chosen_source():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])
        }
        assert not own & cells, f"{panel['title']} lies on another panel"
        cells |= own
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            uids = {target["datasource"]["uid"] for target in panel["targets"]}
            assert uids == {"${datasource}"}
    names = {variable["name"] for variable in dashboard()["templating"]["list"]}
    for title, query in panel_queries():
        used = set(re.findall(r"\$(\w+)", query)) - {"__rate_interval"}
        assert used <= names, title


def test_each_alert_is_tested_and_says_what_to_do():
    tested = (DEPLOY / "alerts_test.yml").read_text(encoding="utf-8")
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        assert f'alertname="{rule["alert"]}",severity="{rule["labels"]["severity"]}"' in tested
        assert rule["annotations"].keys() == {"summary", "description"}
