"""Errors keep their attributes on the way through a pool of processes."""

from __future__ import annotations

import datetime
import pickle

import pytest

import redisacc
from redisacc import errors

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
WITH_ATTRIBUTES = {
    "TakeTimeoutError": {"num_required": 3, "num_accumulated": 1, "workers": {"ann": 1}, "late": ["bob"]},
    "NotFiniteError": {"path": "layers/0", "index": (3, 1)},
    "StepTimeoutError": {"wanted": 4, "global_step": 2},
    "ParametersTimeoutError": {"after": 3, "step": None},
    "FinishedError": {"step": 3},
    "StepConflictError": {"step": 3, "published": 4},
    "NotReplicatedError": {"replicas": 0, "min_replicas": 1},
    "RoundRecoveredError": {
        "token": "a-1", "global_step": 7, "new_owner": "bob", "new_token": "b", "recovered_at": NOW,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", errors.__all__)
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
