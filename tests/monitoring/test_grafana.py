"""The Grafana dashboard: every query parses, and every metric and label in it is one that the exporter has."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.exporter import Exporter

pytestmark = pytest.mark.servers("valkey")

DASHBOARD = json.loads((Path(__file__).parents[2] / "monitoring/grafana/redisacc.json").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
# Grafana replaces its variables before Prometheus sees a query.
VARIABLES = {"$__rate_interval": "1m", "$accumulator": ".*"}
# Labels that Prometheus adds itself.
OF_PROMETHEUS = {"le"}


def queries(panel):
    for target in panel["targets"]:
        text = target["expr"]
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        assert "$" not in text, text
        yield text, target["legendFormat"]


def selectors(node):
    """Yields the vector selectors of a parsed query, and the labels by which it aggregates."""
    match node:
        case promql_parser.VectorSelector():
            yield node.name, {matcher.name for matcher in node.matchers.matchers}
        case promql_parser.MatrixSelector():
            yield from selectors(node.vector_selector)
        case promql_parser.AggregateExpr():
            labels = set(node.modifier.labels) if node.modifier else set()
            yield from ((name, found | labels) for name, found in selectors(node.expr))
        case promql_parser.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from selectors(node.expr)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            raise AssertionError(f"an unknown kind of expression: {type(node).__name__}")


@pytest.fixture
def exported(real_server, open_dense, background, until):
    """Sample name → its labels, of an exporter that has seen two rounds with everything in them."""
    ann, bob = (open_dense("float32", [3], "w", worker=name, staleness=2) for name in ("ann", "bob"))
    exporter = Exporter(real_server.url)
    try:
        for step in range(2):
            take = background(ann.take_grad, 2, timeout=30)
            until(lambda: ann.info().waiting)
            for acc in (ann, bob):
                assert acc.apply_grad([1.0, 2.0, 3.0], step)
            take.result()
        ann.apply_grad([1.0, 2.0, 3.0], 2)

        def samples():
            found = {}
            for family in text_string_to_metric_families("\n".join(exporter.scrape()) + "\n"):
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
            # Events are heard a moment after what they announce.
            return found if "redisacc_round_seconds_bucket" in found else None

        yield until(samples)
    finally:
        exporter.stop()
        ann.delete()


def test_every_query_is_about_what_the_exporter_has(exported):
    seen = set()
    for title, panel in PANELS.items():
        for text, legend in queries(panel):
            found = list(selectors(promql_parser.parse(text)))
            assert found, title
            for name, labels in found:
                assert name in exported, f"{title}: the exporter has no {name}"
                assert labels <= exported[name] | OF_PROMETHEUS, f"{title}: {name} has {exported[name]}, not {labels}"
                seen.add(name)
            shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
            assert all(shown <= exported[name] for name, _ in found), f"{title}: {legend}"
    histograms = {name.removesuffix("_bucket") for name in exported if name.endswith("_bucket")}
    assert len(histograms) == 5
    assert all(f"{name}_bucket" in seen for name in histograms)


def test_the_variable_is_a_label_of_a_metric(exported):
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "accumulator"}
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["accumulator"]["definition"]).groups()
    assert label in exported[name]


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y) for of in places for x in range(of["x"], of["x"] + of["w"]) for y in range(of["y"], of["y"] + of["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
