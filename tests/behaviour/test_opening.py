"""Mistakes that show early: a misspelt name, a wait for nobody, a step that is never given, no server."""

import logging

import pytest

import redisacc

pytestmark = pytest.mark.servers("fakeredis", "valkey")


def test_a_name_that_does_not_exist_is_not_created(open_dense, open_sparse, client):
    for name in ("word-vectors", "word-vectors-2", "images"):
        open_dense("float32", [1], name)
    with pytest.raises(redisacc.NotFoundError, match="accumulator") as failure:
        open_dense("float32", [1], "word-vector", create=False)
    assert str(failure.value) == "there is no accumulator 'word-vector', and create=False forbids to create one"
    with pytest.raises(redisacc.NotFoundError, match=r"forbids to create one$"):
        open_sparse("float32", None, "xyz", create=False)
    assert not client.exists("redisacc:{word-vector}", "redisacc:{xyz}")
    assert client.smembers("redisacc:names") == {b"word-vectors", b"word-vectors-2", b"images"}
    for name in ("word-vectors", "word-vectors-2", "images"):
        open_dense("float32", [1], name, create=False).delete()


def test_a_wait_says_that_nobody_has_ever_applied(open_dense, background, until, durations, caplog):
    durations(report=0.1)
    acc = open_dense("float32", [1])
    nobody = "no gradient was ever applied to this accumulator, so check its name"
    take = background(acc.take_grad, 1)
    until(lambda: nobody in caplog.text)
    acc.apply_grad([1.0])
    take.result()
    caplog.clear()
    take = background(acc.take_grad, 1)
    until(lambda: "is still waiting" in caplog.text)
    assert nobody not in caplog.text
    acc.apply_grad([1.0], local_step=1)
    take.result()


def test_a_wait_for_a_step_is_logged(open_dense, background, until, durations, caplog):
    durations(report=0.1)
    acc = open_dense("float32", [1])
    wait = background(acc.wait_for_step, 3)
    until(lambda: "still waiting for step 3: it is 0" in caplog.text)
    acc.set_global_step(3)
    assert wait.result() == 3


def test_one_warning_if_the_step_is_never_given(open_dense, caplog):
    acc = open_dense("float32", [1])
    acc.set_global_step(1)
    with caplog.at_level(logging.WARNING, logger="redisacc"):
        for _ in range(9):
            assert acc.apply_grad([1.0]).outcome == "stale"
        assert acc.apply_grad([1.0], local_step=1)
        # Counted anew, because one was accepted in between.
        for _ in range(9):
            acc.apply_grad([1.0])
        assert not caplog.records
        for _ in range(30):
            acc.apply_grad([1.0])
    (record,) = caplog.records
    assert (
        "the last 10 gradients were dropped as stale, because they were for step 0 and the step is 1" in record.message
    )
    assert record.message.endswith(
        "If local_step was left out, it is 0: pass the step that the gradient was computed for"
    )


def test_no_warning_where_the_step_is_given(open_dense, caplog):
    acc = open_dense("float32", [1])
    acc.set_global_step(2)
    with caplog.at_level(logging.WARNING, logger="redisacc"):
        for _ in range(12):
            assert acc.apply_grad([1.0], local_step=1).outcome == "stale"
    assert not caplog.records
