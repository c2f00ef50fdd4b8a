"""The dashboard and the alerts ask for metrics, labels and values that a server has: no other would ever be seen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.contracts.results import FinishReason
from mlxstream.v1 import error_pb2
from service.metrics import Metrics
from service.offer import GENERATION_SERVICE
from service.readiness import NotReady
from tests.service.fake_engine import FakeEngine
from tests.service.test_health import READING

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
METRIC = re.compile(r"\b((?:mlx_stream|process)_\w+)(?:\{([^}]*)\})?")
SELECTED = re.compile(r'(\w+)(=~|=)"([^"]*)"')
GROUPED = re.compile(r"\bby \(([^)]*)\)")
# What the Prometheus library tells of a process, on Linux alone.
OF_THE_PROCESS = ("process_resident_memory_bytes", "process_open_fds", "process_max_fds")
# Labels that Prometheus gives to whatever it scrapes.
OF_THE_SCRAPER = {"instance", "job"}
VALUES = {
    "finished_reason": {reason.value for reason in FinishReason},
    "reason": {reason.value for reason in NotReady}
    | {value.name.removeprefix("ERROR_REASON_") for value in error_pb2.ErrorReason.DESCRIPTOR.values},
    "code": {code.name for code in grpc.StatusCode},
}


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """The labels of every sample that a server can have, by its name."""
    engine = FakeEngine()
    engine.reading = READING
    metrics = Metrics(engine)
    metrics.show_readiness(lambda: None)
    metrics.call_ended(f"{GENERATION_SERVICE.full_name}/Generate", "OK", 0.1)
    metrics.refused("OVERLOADED")
    metrics.resumed(hit=True)
    metrics._ends.labels("stop").inc()
    found: dict[str, set[str]] = {name: set() for name in OF_THE_PROCESS}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> list[str]:
    panels = json.loads((DEPLOY / "grafana/mlx-stream.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def problems(expression: str, known: dict[str, set[str]]) -> Iterator[str]:
    """What `expression` asks for that no server has."""
    labels: set[str] = set()
    for name, selectors in METRIC.findall(expression):
        if name not in known:
            yield f"no metric {name}"
            continue
        labels |= known[name]
        for label, how, value in SELECTED.findall(selectors):
            if label not in known[name] | OF_THE_SCRAPER:
                yield f"{name} has no label {label}"
            wanted = value.split("|") if how == "=~" else [value]
            if label in VALUES and not VALUES[label].issuperset(wanted):
                yield f"{label} of {name} is never {value}"
    for grouped in GROUPED.findall(expression):
        for label in grouped.split(", "):
            if label not in labels | OF_THE_SCRAPER:
                yield f"nothing in it has a label {label}"


def test_every_question_of_the_dashboard_has_an_answer(known: dict[str, set[str]]) -> None:
    expressions = dashboard()
    assert [problem for expression in expressions for problem in problems(expression, known)] == []
    assert len({name for expression in expressions for name, _ in METRIC.findall(expression)}) >= 20


def test_every_alert_can_come(known: dict[str, set[str]]) -> None:
    rules = alerts()
    assert [problem for rule in rules for problem in problems(rule["expr"], known)] == []
    assert all(METRIC.search(rule["expr"]) for rule in rules)
    assert len(rules) >= 10


def test_every_alert_says_how_bad_it_is_and_what_to_do_with_labels_that_it_keeps(known: dict[str, set[str]]) -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule
        assert rule["annotations"].keys() == {"summary", "description"}, rule
        kept = {label for grouped in GROUPED.findall(rule["expr"]) for label in grouped.split(", ")} - {"le"}
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert label in (kept or OF_THE_SCRAPER), rule


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(mlx_stream_nothing_total[5m])", "no metric mlx_stream_nothing_total"),
        ('mlx_stream_not_ready{why="failed"} == 1', "mlx_stream_not_ready has no label why"),
        ('mlx_stream_not_ready{reason="tired"} == 1', "reason of mlx_stream_not_ready is never tired"),
        ("sum by (model) (mlx_stream_ready)", "nothing in it has a label model"),
    ],
)
def test_a_question_without_an_answer_would_be_seen(known: dict[str, set[str]], expression: str, problem: str) -> None:
    assert list(problems(expression, known)) == [problem]
