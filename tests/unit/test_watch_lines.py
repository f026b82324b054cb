"""What `redisacc watch` shows of an accumulator, given what is known of it."""

import dataclasses
import datetime

import pytest

from redisacc._format.entries import ReducerInfo
from redisacc.tools.cli.watch import lines_of
from redisacc.tools.monitoring.monitor import View

pytestmark = pytest.mark.servers("fakeredis")


def test_rates_are_per_second(open_dense):
    acc = open_dense("float32", [1], "w")
    info = acc.info()
    view = View(info)
    for seconds, applied in enumerate((10, 20, 60)):
        at = info.read_at + datetime.timedelta(seconds=seconds)
        view.add(dataclasses.replace(info, applied=applied, stale=2 * seconds, takes=seconds, read_at=at))
    assert view.rates == (25.0, 2.0, 1.0)
    acc.delete()


def test_what_is_said_of_one(open_dense):
    acc = open_dense("float32", [1], "w")
    info = acc.info()
    reducer = ReducerInfo("box:1", 3, 3)
    view = View(info)
    view.add(dataclasses.replace(info, unacknowledged=[None] * 12, reducer=reducer))
    start = info.read_at - datetime.timedelta(seconds=1)
    view.history.appendleft((start.timestamp(), -999, -9.5, 0))
    assert lines_of(view) == [
        "w  step 0  0 gradients, no taker waiting",
        "999 applied/s  9.5 stale/s  0.0 rounds/s  reducer keeps up  12 taken but not acknowledged",
    ]
    acc.delete()
