"""Errors keep their attributes on the way through a pool of processes."""

import pickle

import pytest
from support.rows import every_row

import redisacc
from redisacc import errors

WITH_ATTRIBUTES = {
    "TakeTimeoutError": {"num_required": 3, "num_accumulated": 1, "workers": {"ann": 1}, "late": ["bob"]},
    "NotFiniteError": {"path": "layers/0", "index": (3, 1)},
    "FinishedError": {"step": 3},
    "NotReplicatedError": {"replicas": 0, "min_replicas": 1},
}


@every_row("name", errors.__all__)
def test_an_error_survives_pickling(name):
    kind = getattr(redisacc, name)
    given = WITH_ATTRIBUTES.get(name, {})
    error = kind("it failed", lambda: 1) if name == "OutcomeUnknownError" else kind("it failed", **given)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.args) == (str(error), error.args)
    assert {what: getattr(copy, what) for what in given} == given


def test_only_the_process_that_sent_a_request_can_settle_it():
    error = redisacc.OutcomeUnknownError("silent", lambda: 5)
    assert error.settle() == 5
    with pytest.raises(RuntimeError, match="only that process can settle"):
        pickle.loads(pickle.dumps(error)).settle()
