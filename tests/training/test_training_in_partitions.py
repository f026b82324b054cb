"""Trainings whose parameters and gradients lie in partitions."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support.leaks import remaining

import redisacc
from redisacc._format import buffered, parameter_record


@pytest.fixture(autouse=True)
def _cut_what_is_small(monkeypatch):
    monkeypatch.setattr(parameter_record, "SINGLE_PART_BYTES", 0)
    monkeypatch.setattr(buffered, "INLINE_BYTES", 0)


def partitions_of(training):
    return [training.client.hget(f"redisacc:{{train}}{what}", "partitions") for what in ("", ":parameters")]


@pytest.mark.servers("valkey")
def test_a_chief_says_it_once_and_its_successor_adopts_it(training):
    options = {"in_place_limit": 0, "state": [np.arange(3)]}
    first = training.chief({"w": np.zeros(40, np.int64)}, partitions=3, **options)
    assert partitions_of(training) == [b"0,1,2", b"0,1,2"]
    worker = training.work(gradient=lambda number, step, parameters: {"w": np.full(40, step + 1)})
    training.lead(first, 3)
    first.close()
    assert worker.result(30)[1] == [0, 1, 2]
    for other in (1, 2):
        with pytest.raises(redisacc.SchemaMismatchError, match="number of partitions is 3, not"):
            training.chief({"w": np.zeros(40, np.int64)}, partitions=other, **options)
    for partitions, until in ((None, 5), ("auto", 6), (3, 7)):
        chief = training.chief({"w": np.zeros(40, np.int64)}, partitions=partitions, **options)
        worker = training.work(gradient=lambda number, step, parameters: {"w": np.full(40, step + 1)})
        training.lead(chief, until)
        chief.close()
        worker.result(30)
    assert chief.parameters["w"].tolist() == [sum(range(8))] * 40
    chief = training.chief({"w": np.zeros(40, np.int64)}, **options)
    chief.delete()
    assert remaining(training.client) == []


@pytest.mark.servers("valkey")
def test_a_chief_publishes_again_what_a_node_has_lost(training, until, caplog):
    """Its workers wait for that meanwhile, also one that joins only then."""
    chief = training.chief({"w": np.zeros(40, np.int64)}, workers=2, partitions=3, in_place_limit=0)
    ones = {"w": np.ones(40, np.int64)}
    first = training.work(gradient=lambda *_: ones)
    until(lambda: int(training.record[b"num_accumulated"]) == 1)
    lost = sorted(training.client.scan_iter("redisacc:{train/*}:parameters:partition:*"))[1]
    training.client.delete(lost)
    with caplog.at_level(logging.WARNING, "redisacc"):
        second = training.work(gradient=lambda *_: ones)
        until(lambda: "waiting for the chief" in caplog.text)
        assert lost.decode() in caplog.text
        training.lead(chief, 3)
    assert "a node has lost a part of the parameters of step 0; publishing them again" in caplog.text
    assert first.result(30)[1] == second.result(30)[1] == [0, 1, 2]
    assert chief.parameters["w"].tolist() == [6] * 40
    chief.delete()
