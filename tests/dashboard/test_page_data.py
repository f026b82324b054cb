"""What the page gets: the same values as info(), in bounded updates."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from redisacc._dashboard.feed import Feed
from redisacc._dashboard.page_data import NAME, Query, id_of, parse_query, sections
from redisacc._monitoring import collector
from redisacc._monitoring.monitor import Monitor
from redisacc._redis.connect import connect

pytestmark = pytest.mark.servers("valkey")


@pytest.fixture
def monitor(real_server):
    made = Monitor(connect(real_server.url), ["*"])
    yield made
    made.close()


def page(monitor, **query):
    return {name: json.loads(text) for name, text in sections(monitor, Query(**query), "there", "").items()}


@pytest.mark.usefixtures("nobody_is_late")
def test_the_page_says_what_info_says(monitor, open_dense, background, until):
    ann, bob = (open_dense("float32", [3], "w", worker=name, max_staleness=2) for name in ("ann", "bob"))
    monitor.refresh()
    take = background(ann.take_grad, 2, timeout=30)
    until(lambda: ann.info().waiting)
    for acc in (ann, bob):
        acc.apply_grad([1.0, 2.0, 3.0])
    take.result()
    take = background(bob.take_grad, 2, timeout=30)
    until(lambda: ann.info().waiting)
    ann.apply_grad([1.0, 2.0, 3.0], 0)
    until(lambda: monitor._listen().figures("w").rounds and monitor._listen().figures("w").first)
    monitor.refresh()
    found, info = page(monitor, detail=id_of("w")), ann.info()
    row, facts, filling = found[f"row:{id_of('w')}"], found["detail:facts"], found["detail:filling"]
    assert found["order"] == [found["detail:id"]] == [id_of("w")]
    assert (row["name"], row["step"], row["count"]) == (info.name, str(info.global_step), info.num_accumulated)
    assert (row["required"], row["waiting"], row["taker"]) == (2, 1, "bob")
    assert (facts["kind"], facts["dtype"], facts["shape"]) == (info.kind, info.dtype, [3])
    assert (facts["applied"], facts["stale"], facts["takes"]) == (info.applied, info.stale, info.takes) == (3, 0, 1)
    assert filling["staleness"] == [[1, 1]]
    assert filling["first"] == filling["last"] >= filling["began"]
    assert found["detail:staleness"] == [[0, 2], [1, 1]]
    workers = {name: (state, count, applied) for name, state, count, applied, _, _ in found["detail:workers"]["rows"]}
    assert workers["ann"] == ("in the round", 1, 2)
    assert workers["bob"] == ("expected", 0, 1)
    ((step, number, nbytes, taker, phases),) = found["detail:rounds"]
    assert (step, number, nbytes, taker) == ("0", 2, 24, "ann")
    (times,) = monitor._listen().figures("w").rounds
    assert times.first <= times.last <= times.taken
    assert phases[1:] == [round(times.last - times.first, 4), round(times.taken - times.last, 4), None]
    (node,) = found["server"]["nodes"]
    assert node["used_memory"] > 0
    bob.apply_grad([1.0, 2.0, 3.0], 1)
    take.result()
    ann.delete()


def test_weights_are_shown(monitor, open_dense, background, until):
    acc = open_dense("float32", [1], "w", worker="chief")
    acc.apply_grad([1.0], weight=0.5)
    take = background(acc.take_grad, 1, min_weight=2.5, timeout=30)
    until(lambda: acc.info().waiting)
    monitor.refresh()
    found = page(monitor, detail=id_of("w"))
    assert found["detail:filling"]["total_weight"] == acc.info().total_weight == 0.5
    assert [of["weight"] for of in found["detail:waiting"]] == [2.5]
    acc.apply_grad([1.0], weight=2.0)
    take.result()
    acc.delete()


def test_parameters_are_the_end_of_a_round(monitor, open_dense, open_parameters, until):
    acc, parameters = open_dense("float32", [1], "w"), open_parameters("w")
    monitor.refresh()
    acc.apply_grad([1.0])
    acc.take_grad(1)
    parameters.publish([1.0], 1)
    until(lambda: [of for of in monitor._listen().figures("w").rounds if of.published])
    monitor.refresh()
    assert page(monitor, detail=id_of("w"))["detail:rounds"][0][4][3] >= 0
    acc.delete()


def test_only_what_has_changed_is_read_in_full(monitor, open_dense, monkeypatch):
    accs = [open_dense("float32", [1], f"w-{n}") for n in range(5)]
    for acc in accs:
        acc.apply_grad([1.0])
    monitor.refresh()
    read = []
    whole = collector.read_info
    monkeypatch.setattr(collector, "read_info", lambda server, keys: read.append(keys.name) or whole(server, keys))
    monitor.refresh()
    assert read == []
    accs[3].apply_grad([1.0])
    accs[1].delete()
    monitor.refresh()
    assert read == ["w-3"]
    assert list(monitor.views) == ["w-0", "w-2", "w-3", "w-4"]
    assert monitor.views["w-3"].info == accs[3].info()
    # Without time, only what somebody looks at is read.
    read.clear()
    accs[2].apply_grad([1.0])
    accs[3].apply_grad([1.0])
    monitor.refresh(budget=0, first=["w-3"])
    assert read == ["w-3"]
    monitor.refresh()
    assert read == ["w-3", "w-2"]
    for acc in (accs[0], *accs[2:]):
        acc.delete()


@pytest.mark.forges
def test_an_accumulator_with_foreign_data_does_not_hide_the_others(monitor, open_dense, client):
    acc = open_dense("float32", [1], "w")
    for name in ("corrupt", "wrong-type"):
        client.sadd("redisacc:names", name)
    client.hset("redisacc:{corrupt}", "global_step", "x")
    client.set("redisacc:{wrong-type}", "x")
    monitor.refresh()
    assert list(monitor.views) == ["w"]
    assert len(page(monitor)["server"]["problems"]) == 2
    acc.delete()


@pytest.mark.forges
def test_names_are_printable_and_cut(monitor, open_dense, client):
    acc = open_dense("float32", [1], "w")
    evil = "<script>\u202e\x1b[2J" + "x" * 300
    now = int(time.time() * 1000)
    client.hset("redisacc:{w}:sessions", f"{now}-1", f"1 applied 0 1 {now} 1 0 {evil}")
    monitor.refresh()
    (found,) = page(monitor, detail=id_of("w"))["detail:workers"]["rows"]
    assert found[0].startswith("<script>\\u202e\\x1b[2Jx")
    assert len(found[0]) == NAME
    acc.delete()


def test_a_page_is_filtered_sorted_and_cut(monitor, open_dense):
    accs = {name: open_dense("float32", [1], name) for name in ("b-one", "a-two", "A-three", "other")}
    accs["a-two"].set_global_step(5)
    accs["A-three"].set_global_step(9)
    monitor.refresh()

    def names(**query):
        found = page(monitor, **query)
        return [found[f"row:{of}"]["name"] for of in found["order"]]

    assert names() == ["A-three", "a-two", "b-one", "other"]
    assert names(text="a-T") == ["A-three", "a-two"]
    assert names(sort="step", rows=2) == ["A-three", "a-two"]
    assert page(monitor, text="a-", rows=1)["server"]["matching"] == 2
    assert page(monitor, detail="no such id")["detail:id"] is None
    for acc in accs.values():
        acc.delete()


def test_the_parameters_of_a_url_have_limits():
    assert parse_query({}) == Query()
    wanted = {"text": "x" * 999, "sort": "x", "rows": "99999", "workers": "-1", "detail": "y" * 99}
    assert parse_query(wanted) == Query("x" * 200, "name", 1000, "y" * 16, 100)


def test_updates_hold_what_has_changed_and_end_when_the_feed_is_closed(real_server, monitor, open_dense):
    acc = open_dense("float32", [1], "w")
    feed = Feed(connect(real_server.url), monitor, 0.01)

    async def watch():
        found = []
        async for text in feed.updates(Query()):
            found.append(json.loads(text)["changed"])
            if len(found) == 1:
                await asyncio.to_thread(acc.apply_grad, [1.0])
            row = found[-1].get(f"row:{id_of('w')}", {})
            if len(found) > 1 and row.get("count") == 1:
                feed.close()
        return found

    first, *_, last = asyncio.run(asyncio.wait_for(watch(), 30))
    assert set(first) == {"server", "order", f"row:{id_of('w')}", "detail:id"}
    assert "order" not in last
    acc.delete()
