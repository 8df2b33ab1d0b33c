"""Queries of the dashboard and of the alerts, and the metrics and labels that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "weft.json"
SELECTOR = re.compile(r"\b(weft[:_]\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPED = re.compile(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)")


class Selector(NamedTuple):
    """A metric with matchers of its labels: (label, operator, value)."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panel_queries() -> Iterator[tuple[str, str]]:
    """Titles of panels and their queries, as they are in the file."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def alert_queries() -> Iterator[tuple[str, str]]:
    """Names of alerts and their expressions."""
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def annotation_queries() -> Iterator[tuple[str, str]]:
    """Titles of the marks in panels, and what they ask for."""
    for annotation in dashboard()["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def variable_queries() -> Iterator[tuple[str, str]]:
    """Names of the dashboard's variables, and where Grafana takes their values from."""
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


def selectors(query: str) -> list[Selector]:
    """The metrics that a query names, with what it demands of their labels."""
    return [
        Selector(name, tuple(MATCHER.findall(inside or "")))
        for name, inside in SELECTOR.findall(query)
    ]


def grouped_by(query: str) -> set[str]:
    """The labels by which a query groups."""
    return {label.strip() for words in GROUPED.findall(query) for label in words.split(",")}
