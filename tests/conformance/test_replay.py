"""Recorded outcomes of TensorFlow, case by case: ours are the same, or those that departures lists."""

import pytest
from departures import DEPARTURES, Departure
from record import load
from replay import Summary, compare, replay
from sequences import all_cases
from support.selection import thorough
from support.servers import FAKE

RECORDED = load()
CASES = RECORDED["cases"]
RANDOM = [case for case in CASES if case["id"].startswith("random-")]
NAMED = [case for case in CASES if not case["id"].startswith("random-")]
GROUPS = sorted({case["row"].split(":")[0] for case in NAMED})


def _check(cases, client, storage, *, sparing=False):
    assert cases
    summary = replay(cases, client, storage, sparing=sparing)
    assert not summary.differences, "\n".join([str(summary), *summary.differences])


# The ways of storing gradients share all but the place of the bytes, so `make test` takes every case in some of them.


@pytest.mark.servers("valkey")
@pytest.mark.fixed("encoding")
@pytest.mark.usual(storage="in_place")
@pytest.mark.parametrize("group", GROUPS)
def test_named_cases_on_valkey(client, storage, group):
    _check([case for case in NAMED if case["row"].startswith(group)], client, storage)


@pytest.mark.servers("valkey")
@pytest.mark.thorough
@pytest.mark.fixed("encoding")
@pytest.mark.usual(storage="buffered_inline")
def test_random_sequences_on_valkey(client, storage):
    _check(RANDOM, client, storage, sparing=True)


# The other servers get a sample in one way of storing: it is their Lua that may differ, and the fake one adds nothing.


@pytest.mark.slow
@pytest.mark.servers("redis7", "redis62")
@pytest.mark.every_server
@pytest.mark.parametrize("every", thorough([2, 8], usual=[8]))
def test_cases_on_older_servers(client, every):
    _check(NAMED[::every] + RANDOM[:: 4 * every], client, "in_place")


@pytest.mark.slow
@pytest.mark.servers(FAKE)
@pytest.mark.parametrize("every", thorough([3, 12], usual=[12]))
def test_cases_on_the_fake_server(client, every):
    _check(NAMED[::every] + RANDOM[:: 5 * every], client, "buffered_inline")


def test_the_recording_is_of_these_cases():
    """A changed case has to be recorded again."""
    outcomes = ("construction", "outcomes")
    stored = {case["id"]: {k: v for k, v in case.items() if k not in outcomes} for case in CASES}
    assert stored == {case["id"]: case for case in all_cases()}


def test_the_recording_is_of_the_tensorflow_that_the_page_speaks_of():
    assert RECORDED["tensorflow"].startswith("2.21.")


def test_departures_are_of_cases_that_exist():
    assert not DEPARTURES.keys() - {case["id"] for case in CASES}


# The comparison itself: each of these differences must be noticed.

CASE = {
    "id": "made up",
    "handles": [{}],
    "ops": [{"op": "apply"}, {"op": "take"}],
    "construction": {"ok": None},
    "outcomes": [
        {"ok": None, "count": 1},
        {"ok": {"dtype": "float32", "shape": [1], "hex": "0000803f"}, "count": 0},
    ],
}
APPLIED = {"ok": None, "count": 1, "applied": True, "said": 1}
TAKEN = {"ok": {"dtype": "float32", "shape": [1], "hex": "0000803f"}, "count": 0}


def _differences(outcomes, monkeypatch, departure=None):
    if departure:
        monkeypatch.setitem(DEPARTURES, "made up", departure)
    summary = Summary()
    compare(CASE, {"construction": {"ok": None}, "outcomes": outcomes}, summary)
    return summary.differences


def test_nothing_differs(monkeypatch):
    assert _differences([APPLIED, TAKEN], monkeypatch) == []


@pytest.mark.parametrize(
    "ours",
    [
        [{**APPLIED, "applied": False}, TAKEN],
        [{**APPLIED, "said": 2}, TAKEN],
        [{**APPLIED, "count": 2, "said": 2}, TAKEN],
        [{"error": "InvalidArgumentError", "count": 1}, TAKEN],
        [APPLIED, {"blocked": True, "count": 0}],
        [APPLIED, {"error": "TypeError", "count": 0}],
        [APPLIED, {**TAKEN, "count": 1}],
        # the next number, another dtype, another shape
        [APPLIED, {**TAKEN, "ok": {"dtype": "float32", "shape": [1], "hex": "0100803f"}}],
        [APPLIED, {**TAKEN, "ok": {"dtype": "int32", "shape": [1], "hex": "0000803f"}}],
        [APPLIED, {**TAKEN, "ok": {"dtype": "float32", "shape": [], "hex": "0000803f"}}],
        [APPLIED, {**TAKEN, "ok": [TAKEN["ok"], TAKEN["ok"], TAKEN["ok"]]}],
    ],
)
def test_a_difference_is_noticed(ours, monkeypatch):
    assert len(_differences(ours, monkeypatch)) == 1


def test_a_departure_that_is_none_is_noticed(monkeypatch):
    departure = Departure("row", "why", {1: TAKEN})
    assert "no departure any more" in _differences([APPLIED, TAKEN], monkeypatch, departure)[0]


def test_another_departure_than_the_listed_one_is_noticed(monkeypatch):
    departure = Departure("row", "why", {1: {"blocked": True}})
    ours = [APPLIED, {"error": "InvalidArgumentError"}]
    assert "not the one" in _differences(ours, monkeypatch, departure)[0]
