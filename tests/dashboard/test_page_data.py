"""What the page gets: the same values as info(), in bounded updates."""

import asyncio
import itertools
import json
import math
import os
import re
import socket
import sys
import time

import numpy as np
import pytest
from support.training_options import grouped

import redisacc
from redisacc._format.history_entries import PastStep
from redisacc._format.keys import ParameterKeys
from redisacc._wire.connect import connect
from redisacc.tools.dashboard.feed import Feed
from redisacc.tools.dashboard.page_data import NAME, Query, id_of, parse_query, sections
from redisacc.tools.monitoring.facts import bytes_text, step_seconds_text
from redisacc.tools.monitoring.monitor import Monitor, curves

pytestmark = pytest.mark.servers("valkey")


@pytest.fixture
def monitor(real_server):
    made = Monitor(connect(real_server.url), ["*"])
    yield made
    made.close()


def page(monitor, **query):
    return {name: json.loads(text) for name, text in sections(monitor, Query(**query), "").items()}


def test_a_training_has_curves_its_progress_and_the_step_time_of_each_worker(monitor, real_client, until):
    model, name = {"w": np.zeros(500, np.float32)}, id_of("t")
    options = {"optimizer": redisacc.optim.SGD(0.1, momentum=0.9), "workers": 1, "number": 0, "redis": real_client}
    with redisacc.Training("t", model, **grouped(options)) as training:
        for step, weights in training.steps(until=8):
            if step == 5:
                monitor.refresh()
                assert page(monitor, detail=name)["detail:curves"]["names"] == []
            if step >= 5:
                monitor.refresh(first=["t"])
                found = page(monitor, detail=name)
                of, curves = found["detail:training"], found["detail:curves"]
                assert (of["step"], of["until"], of["share"], of["finished"]) == (str(step), "8", step / 8, False)
                listed, view = dict(of["listed"]), monitor.views["t"]
                assert listed["led by"] == f"{socket.gethostname()}:{os.getpid()}"
                info = view.parameters
                assert (listed["leaves"], listed["state"], listed["stored"]) == (
                    "1 (1.95 KiB)", bytes_text(info.state_bytes), bytes_text(info.stored_bytes),
                )  # fmt: skip
                assert listed["step time"] == step_seconds_text(view.step_seconds)
                assert of["left"] == pytest.approx(view.step_seconds * (8 - step), rel=0.02)
                assert (curves["names"], curves["latest"]) == (["loss", "acc"], [f"{2.0 - step:.4g}", "nan"])
                assert curves["steps"] == list(range(step))
                losses, nothing, times = curves["values"]
                assert nothing == [None] * step
                assert losses == [1.0 - past for past in range(step)]
                assert all(seconds is not None and seconds >= 0 for seconds in times)
            if step == 6:
                until(lambda: monitor._listen().history("t").worker_seconds)
                monitor.refresh(first=["t"])
                ((worker, process, memory, *_, took),) = page(monitor, detail=name)["detail:workers"]["rows"]
                assert (worker, process) == ("worker 0", f"{socket.gethostname()}:{os.getpid()}")
                assert memory is None or 2**20 < memory < 2**40
                assert (memory is None) == (sys.platform != "linux")
                # A round of one gradient of each worker has no limit that anybody would want to know.
                assert page(monitor, detail=name)["detail:facts"]["buffer_limit"] is None
                assert 0 <= took < 60
            training.apply(weights, metrics={"loss": 1.0 - step, "acc": float("nan")})
        monitor.refresh(first=["t"])
        of = page(monitor, detail=name)["detail:training"]
        assert (of["step"], of["finished"]) == ("8", True)
        training.delete()


def past(step, **metrics):
    return PastStep(step, 1000.0 + step, 0.5, 1, metrics)


@pytest.mark.parametrize("number", [1, 2, 99, 100, 101, 1000])
def test_curves_have_few_points_which_stay_where_they_are(number):
    steps = [past(step, loss=float(step)) for step in range(7, 7 + number)]
    at, (losses, times) = curves(steps, ["loss"], 100)
    assert min(number, 100) / 3 < len(at) <= max(number, 1)
    assert len(at) <= 100
    assert at[-1] == 6 + number
    assert sum(losses) / len(losses) == pytest.approx(7 + (number - 1) / 2, rel=0.1)
    assert times == pytest.approx([0.5] * len(times))
    later, (others, _) = curves([*steps, past(7 + number, loss=0.0)], ["loss"], 200)
    if len(steps) < 100:
        assert (later[:-1], others[:-1]) == (at, losses)


def test_a_mean_in_a_curve_leaves_out_what_is_not_finite():
    steps = [past(0, loss=math.nan), past(1, loss=math.inf), past(2, loss=1e308), past(3, loss=1e308), past(4)]
    assert curves(steps, ["loss"], 3) == ([1, 3, 4], [[None, 1e308, None], [0.5] * 3])
    assert curves([], ["loss"], 3) == ([], [])


@pytest.fixture
def commands(real_client):
    """Returns what a server is asked in a call, from any client."""

    def record(call, *args, **options):
        with real_client.monitor() as heard:
            call(*args, **options)
            real_client.echo("over")
            texts = (said["command"] for said in heard.listen())
            return list(itertools.takewhile(lambda text: text != "ECHO over", texts))

    return record


def test_a_history_is_read_when_there_is_a_new_step(monitor, real_client, commands):
    model, keys, read = {"w": np.zeros(2)}, ParameterKeys("t"), []

    def refresh():
        asked = commands(monitor.refresh, first=["t"])
        read.append(any(re.match(r"ZRANGE \S+:history \S+ \S+ BYSCORE", text) for text in asked))

    options = {"update": lambda taken, w, state: (w, state), "workers": 1, "number": 0, "redis": real_client}
    with redisacc.Training("t", model, **grouped(options)) as training:
        for step, weights in training.steps(until=6):
            if step in (2, 5):
                refresh()
                refresh()
                assert [past.step for past in monitor.views["t"].steps] == list(range(step))
            training.apply(weights, metrics={"loss": step})
        assert read == [True, False, True, False]
        # The server was restarted from older data.
        real_client.zremrangebyscore(keys.history, 2, "+inf")
        real_client.hset(keys.record, "history_latest", real_client.zrange(keys.history, -1, -1)[0])
        monitor.views["t"].summary = []
        refresh()
        assert [past.step for past in monitor.views["t"].steps] == [0, 1]
        training.delete()
    with redisacc.Training("t", model, **grouped(options)) as training:
        for _, weights in training.steps(until=1):
            training.apply(weights, metrics={"loss": 0})
        refresh()
        assert [past.step for past in monitor.views["t"].steps] == [0]
        training.delete()


@pytest.mark.usefixtures("nobody_is_late")
def test_the_page_says_what_info_says(monitor, open_dense, background, until):
    ann, bob = (open_dense("float32", [3], "w", worker=name, staleness=2) for name in ("ann", "bob"))
    monitor.refresh()
    take = background(ann.take_grad, 2, timeout=30)
    until(lambda: ann.info().waiting)
    for acc in (ann, bob):
        acc.apply_grad([1.0, 2.0, 3.0])
    take.result()
    take = background(bob.take_grad, 2, timeout=30)
    until(lambda: ann.info().waiting)
    ann.apply_grad([1.0, 2.0, 3.0], 0)
    until(lambda: monitor._listen().history("w").rounds and monitor._listen().history("w").filling.first)
    monitor.refresh()
    found, info = page(monitor, detail=id_of("w")), ann.info()
    row, facts, filling = found[f"row:{id_of('w')}"], found["detail:facts"], found["detail:filling"]
    assert found["order"] == [found["detail:id"]] == [id_of("w")]
    assert (row["name"], row["step"], row["count"]) == (info.name, str(info.global_step), info.num_accumulated)
    assert (row["required"], row["waiting"], found["detail:waiting"][0]["taker"]) == (2, 1, "bob")
    assert facts["kind"] == "dense float32 [3] MEAN"
    assert ["in total", "3 applied, 0 stale, 0 repeated, 0 sent twice, 1 taken"] in facts["listed"]
    assert filling["staleness"] == [[1, 1]]
    assert filling["first"] == filling["last"] >= filling["began"]
    assert found["detail:staleness"] == [[0, 2], [1, 1]]
    workers = {
        name: (state, count, applied) for name, _, _, state, count, applied, *_ in found["detail:workers"]["rows"]
    }
    assert workers["ann"] == ("in the round", 1, 2)
    assert workers["bob"] == ("expected", 0, 1)
    ((step, number, nbytes, taker, phases),) = found["detail:rounds"]
    assert (step, number, nbytes, taker) == ("0", 2, 24, "ann")
    (times,) = monitor._listen().history("w").rounds
    assert times.first <= times.last <= times.taken
    assert phases[1:] == [round(times.last - times.first, 4), round(times.taken - times.last, 4), None]
    (node,) = found["server"]["nodes"]
    assert node["used_memory"] > 0
    bob.apply_grad([1.0, 2.0, 3.0], 1)
    take.result()


def test_a_stall_says_who_is_waited_for_and_trainings_come_first(
    monitor, open_dense, open_parameters, real_client, background, until
):
    acc, _other = open_dense("float32", [1], "w", worker="ann"), open_dense("float32", [1], "other")
    open_parameters("w").publish([1.0], 0)
    monitor.refresh()
    for worker in ("ann", "bob"):
        open_dense("float32", [1], "w", worker=worker).apply_grad([1.0])
    acc.take_grad(2)
    # Bob was seen ten minutes ago, and is gone.
    for session, entry in real_client.hgetall("redisacc:{w}:sessions").items():
        if entry.endswith(b"bob"):
            fields = entry.split(b" ", 7)
            fields[4] = b"%d" % (int(fields[4]) - 600_000)
            real_client.hset("redisacc:{w}:sessions", session, b" ".join(fields))
    acc.apply_grad([1.0], 1)
    monitor.refresh(first=["w"])
    found = page(monitor, detail=id_of("w"))
    assert found["order"] == [id_of("w"), id_of("other")]
    # Nobody waits.
    assert (found["detail:stall"], found[f"row:{id_of('w')}"]["stalled"]) == (None, False)
    take = background(acc.take_grad, 2, timeout=60)
    until(lambda: acc.info().waiting)
    until(lambda: monitor._listen().history("w").filling.last)
    monitor.refresh(first=["w"])
    found = page(monitor, detail=id_of("w"))
    assert found["detail:stall"] | {"since": 0} == {"workers": ["bob"], "more": 0, "since": 0}
    assert found["detail:stall"]["since"] == found["detail:filling"]["last"]
    row = found[f"row:{id_of('w')}"]
    assert (row["training"], row["stalled"]) == (True, True)
    assert not found[f"row:{id_of('other')}"]["training"]
    open_dense("float32", [1], "w", worker="bob").apply_grad([1.0], 1)
    take.result()


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


def test_only_what_has_changed_is_read_in_full(monitor, open_dense, commands):
    accs = [open_dense("float32", [1], f"w-{n}") for n in range(5)]
    for acc in accs:
        acc.apply_grad([1.0])
    monitor.refresh()

    def read(**options):
        # Only the whole of an accumulator has its sessions.
        found = (re.match(r"HSCAN redisacc:\{(.+)\}:sessions", text) for text in commands(monitor.refresh, **options))
        return [match[1] for match in found if match]

    assert read() == []
    accs[3].apply_grad([1.0])
    accs[1].delete()
    assert read() == ["w-3"]
    assert list(monitor.views) == ["w-0", "w-2", "w-3", "w-4"]
    assert monitor.views["w-3"].info == accs[3].info()
    # Without time, only what somebody looks at is read.
    accs[2].apply_grad([1.0])
    accs[3].apply_grad([1.0])
    assert read(budget=0, first=["w-3"]) == ["w-3"]


@pytest.mark.forges
def test_an_accumulator_with_foreign_data_does_not_hide_the_others(monitor, open_dense, client):
    open_dense("float32", [1], "w")
    for name in ("corrupt", "wrong-type"):
        client.sadd("redisacc:names", name)
    client.hset("redisacc:{corrupt}", "global_step", "x")
    client.set("redisacc:{wrong-type}", "x")
    monitor.refresh()
    assert list(monitor.views) == ["w"]
    assert len(page(monitor)["server"]["problems"]) == 2


@pytest.mark.forges
def test_names_are_printable_and_cut(monitor, open_dense, client):
    open_dense("float32", [1], "w")
    evil = "<script>\u202e\x1b[2J" + "x" * 300
    now = int(time.time() * 1000)
    client.hset("redisacc:{w}:sessions", f"{now}-1", f"1 applied 0 1 {now} 1 0 {evil}")
    monitor.refresh()
    (found,) = page(monitor, detail=id_of("w"))["detail:workers"]["rows"]
    assert found[0].startswith("<script>\\u202e\\x1b[2Jx")
    assert len(found[0]) == NAME


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
    feed = Feed(monitor, 0.01)

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
