"""The entries of the history of a training, and how a long one is thinned."""

import dataclasses
import math

import numpy as np
import pytest

from redisacc._arrays.metrics import MOST_BYTES
from redisacc._format.history_entries import history_text, parse_history
from redisacc._wire import script_loader

RECORD, HISTORY = "redisacc:{train}:parameters", "redisacc:{train}:parameters:history"

# Adds steps from ARGV[1] up to ARGV[2], as the scripts that publish do.
ADDS = """
for step = tonumber(ARGV[1]), tonumber(ARGV[2]) - 1 do
  local text = string.format('%.17g', step) .. ' 3 loss=0.25'
  redis.call('HSET', KEYS[1], 'history_latest', keep_history(KEYS[1], KEYS[2], text, '5'))
end
"""


def test_metrics_that_are_too_long_are_left_out_by_name():
    metrics = {f"{number:064}": 0.1 for number in range(30)}
    text = history_text(2**63 - 1, 10**15 - 1, metrics)
    assert len(text) <= MOST_BYTES + 40
    (past,) = parse_history("key", [text.replace(" ", f" {10**15 - 1} ", 1).encode()], None)
    assert past.metrics == dict(list(metrics.items())[: len(past.metrics)])
    assert len(past.metrics) == MOST_BYTES // 69
    assert math.isnan(past.seconds)


def test_steps_that_are_left_out_share_their_time():
    entries = [b"0 2000 1", b"1 2500 1", b"5 4500 2 loss=1.5", b"5 4500 2 loss=1.5"]
    steps = parse_history("key", entries, 1000)
    assert [dataclasses.astuple(step) for step in steps] == [
        (0, 2.0, 1.0, 1, {}),
        (1, 2.5, 0.5, 1, {}),
        (5, 4.5, 0.5, 2, {"loss": 1.5}),
    ]


@pytest.fixture
def history(client):
    """Adds a range of steps to a history that keeps 20, or another number of them; returns what is kept."""
    text = (script_loader.folder() / "include" / "keep_history.lua").read_text()
    assert "KEPT = 1000" in text

    def add(steps, kept=20):
        script = text.replace("KEPT = 1000", f"KEPT = {kept}") + ADDS
        client.eval(script, 2, RECORD, HISTORY, steps.start, steps.stop)
        return [int(entry.split()[0]) for entry in client.zrange(HISTORY, 0, -1)]

    yield add
    client.delete(RECORD, HISTORY)


def check_spread(found, until, most):
    """Checks that these are steps of a whole run, evenly spread, with the first and the latest one."""
    assert (found[0], found[-1]) == (0, until - 1)
    assert found == sorted(set(found))
    # About half as many remain when the stride has just been doubled and everything is thinned.
    assert most / 2 < len(found) <= most + 10
    assert max(np.diff(found)) <= 4 * until / most


@pytest.mark.servers("fakeredis", "valkey")
@pytest.mark.parametrize("first", [0, -100, 2**53 - 2000])
def test_it_is_thinned_and_not_cut(client, history, first):
    begun = 0
    for until in (20, 21, 22, 40, 41, 60, 100, 333, 777, 1500):
        steps = history(range(first + begun, first + until))
        begun = until
        latest = int(client.hget(RECORD, "history_latest").split()[0])
        assert latest == first + until - 1
        assert len(steps) <= 28
        stride = int(client.hget(RECORD, "history_stride") or 1)
        # The pass that halves it has reached this step.
        assert sum(step % stride != 0 for step in steps) <= 20
        if first == 0:
            check_spread(sorted({*steps, latest}), until, min(20, until))


@pytest.mark.servers("valkey")
def test_a_long_run_has_about_a_thousand_steps(history):
    for first in range(0, 30_000, 1000):
        steps = history(range(first, first + 1000), 1000)
    check_spread(sorted({*steps, 29_999}), 30_000, 1000)


@pytest.mark.servers("valkey")
@pytest.mark.parametrize(
    ("stride", "thinned"),
    [(text, "2") for text in ("x", "0", "-1", "nan", "inf", "1e999", "0.5")]
    + [("2", text) for text in ("x", "nan", "inf", "-inf", "(")],
)
def test_foreign_numbers_of_the_thinning_do_no_harm(client, history, stride, thinned):
    history(range(22))
    client.hset(RECORD, mapping={"history_stride": stride, "history_thinned": thinned})
    assert len(history(range(22, 60))) <= 60
    assert client.hget(RECORD, "history_latest").startswith(b"59 ")


@pytest.mark.servers("valkey")
def test_a_history_whose_record_is_gone_is_replaced(client, history):
    history(range(3))
    client.delete(RECORD)
    assert history(range(1)) == [0]
