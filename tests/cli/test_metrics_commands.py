"""Metrics and trainings in the commands `apply`, `show`, `watch` and `export`, and in ``info()``."""

import json
import os
import re
import socket

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey")


@pytest.fixture(params=["optimizer", "update"])
def training(request, real_client):
    """A training of 4 steps that stopped before the last one."""
    how = {
        "optimizer": {"optimizer": redisacc.optim.SGD(0.1, momentum=0.9)},
        "update": {"update": lambda taken, w, state: (w, state)},
    }
    model = {"w": np.zeros(1000, np.float32)}
    with redisacc.Training("t", model, workers=1, number=0, redis=real_client, **how[request.param]) as training:
        for step, weights in training.steps(until=4):
            if step == 3:
                yield training
            training.apply(weights, metrics={"loss": 1 / 2**step, "acc": float("nan")})
        training.delete()


def test_info_has_the_metrics_of_the_latest_round(open_dense, client):
    acc = open_dense("float32", [2], "w")
    assert acc.info().metrics == {}
    acc.apply_grad([1, 2], metrics={"loss": 0.5})
    assert acc.info().metrics == {}
    with acc.take(1):
        assert acc.info().metrics == {}
    assert acc.info().metrics == {"loss": 0.5}
    acc.apply_grad([1, 2], 1, metrics={"loss": 0.25, "acc": float("inf")})
    acc.take_grad(1)
    assert acc.info().metrics == {"acc": float("inf"), "loss": 0.25}
    assert client.hget("redisacc:{w}", "metrics") == b"acc=inf loss=0.25"
    # A round without metrics costs nothing and leaves them.
    acc.apply_grad([1, 2], 2)
    acc.take_grad(1)
    assert acc.info().metrics == {"acc": float("inf"), "loss": 0.25}
    client.hset("redisacc:{w}", "metrics", "loss")
    with pytest.raises(redisacc.CorruptDataError, match="metrics holds b'loss'"):
        acc.info()


@pytest.mark.forges
def test_a_round_whose_record_is_gone_leaves_none(open_dense, real_client):
    acc = open_dense("float32", [2], "w")
    acc.apply_grad([1, 2], metrics={"loss": 0.5})
    with acc.take(1):
        real_client.delete("redisacc:{w}")
    assert sorted(real_client.keys("redisacc:{*")) == [b"redisacc:{w}:sessions"]


def test_show(cli, cli_json, training):
    text = cli("show", "t").stdout
    assert re.search(r"\n  metrics +acc nan, loss 0.25\n", text)
    assert re.search(r"\n  chief +\S+:\d+\n", text)
    assert re.search(r"\n  step +3 of 4 \(75 %\)\n", text)
    assert re.search(r"\n  step time +[\d.]+ m?s\n", text)
    found = cli_json("show", "t")
    parameters = found["parameters"]
    assert (found["metrics"], found["chief"]) == ({"acc": "nan", "loss": 0.25}, f"{socket.gethostname()}:{os.getpid()}")
    assert (parameters["step"], parameters["until"]) == (3, 4)
    assert (parameters["latest"]["step"], parameters["latest"]["num_accumulated"]) == (2, 1)
    assert 0 < parameters["latest"]["seconds"] < 60
    assert found["memory"]["parameters"]["bytes"] == parameters["stored_bytes"]
    assert re.search(r"\n  parameters +\d+ +[\d.]+ KiB\n", text)


def test_watch(cli, training):
    facts = json.loads(cli("watch", "t", "-n", 1, "--json").stdout)
    assert facts["metrics"] == {"acc": "nan", "loss": 0.25}
    of = facts["parameters"]
    assert (of["step"], of["until"], of["finished"]) == (3, 4, False)
    assert re.fullmatch(r"\S+:\d+", facts["chief"])
    assert 0 < facts["step_seconds"] < 60
    assert of["stored_bytes"] >= of["nbytes"] == 4000
    line = cli("watch", "t", "-n", 1).stdout
    assert re.search(r"  step 3 of 4 \(75 %\)  .*  acc nan, loss 0.25  led by \S+:\d+  .* a step  parameters ", line)


def test_export(export, cli_json, training):
    lines = export("t").scrape()
    info = cli_json("show", "t")["parameters"]
    state_bytes, stored_bytes = (float(info[name]) for name in ("state_bytes", "stored_bytes"))
    for line in (
        'redisacc_metric{accumulator="t",metric="acc"} NaN',
        'redisacc_metric{accumulator="t",metric="loss"} 0.25',
        'redisacc_parameters_step{accumulator="t"} 3.0',
        'redisacc_until{accumulator="t"} 4.0',
        'redisacc_finished{accumulator="t"} 0.0',
        'redisacc_parameters_bytes{accumulator="t"} 4000.0',
        f'redisacc_state_bytes{{accumulator="t"}} {state_bytes}',
        f'redisacc_stored_bytes{{accumulator="t"}} {stored_bytes}',
    ):
        assert line in lines
    assert any(line.startswith('redisacc_step_seconds{accumulator="t"} ') for line in lines)


def test_the_last_step_is_announced_by_each_chief(cli, real_client):
    record = "redisacc:{t}:parameters"
    with redisacc.Chief("t", {"w": np.zeros(2)}, workers=1, redis=real_client) as chief:
        assert real_client.hget(record, "until") == b""
        rounds = chief.rounds(until=0)
        assert list(rounds) == []
        assert real_client.hget(record, "until") == b"0"
    with redisacc.Chief("t", {"w": np.zeros(2)}, workers=1, redis=real_client) as chief:
        assert real_client.hget(record, "until") == b""
        real_client.hset(record, "until", "x")
        shown = cli("show", "t")
        assert (shown.exit_code, "until holds b'x'" in shown.stderr) == (1, True)
        chief.delete()
