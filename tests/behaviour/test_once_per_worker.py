"""A round that accepts one gradient of each worker: decided by the server, for the accumulator or for one gradient."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import redisacc


@pytest.mark.every_server
def test_a_second_gradient_of_a_worker_is_dropped(open_dense_stored):
    ann = open_dense_stored("float32", [2], "crew", worker="ann", reduction_type="SUM", once_per_worker=True)
    bob = open_dense_stored("float32", [2], "crew", worker="bob", reduction_type="SUM")
    assert ann.apply_grad([1.0, 2.0]).outcome == "applied"
    again = ann.apply_grad([10.0, 20.0])
    assert (bool(again), again.outcome, again.global_step, again.num_accumulated) == (False, "repeated", 0, 1)
    # The second handle was opened without the setting, and has it.
    assert bob.apply_grad([100.0, 200.0])
    assert bob.apply_grad([100.0, 200.0]).outcome == "repeated"
    info = ann.info()
    assert (info.applied, info.repeated, info.stale, info.workers) == (2, 2, 0, {"ann": 1, "bob": 1})
    assert info.once_per_worker
    assert ann.take_grad(2).tolist() == [101.0, 202.0]
    # The next round accepts both again.
    assert ann.apply_grad([1.0, 1.0], local_step=1)
    assert bob.apply_grad([1.0, 1.0], local_step=1)
    ann.delete()


@pytest.mark.every_server
def test_a_single_gradient_may_ask_for_it(open_sparse_stored):
    acc = open_sparse_stored("float32", [9, 1], worker="ann", reduction_type="SUM")
    assert acc.apply_grad([1], [[1.0]], once_per_worker=True)
    assert acc.apply_grad([1], [[2.0]])
    assert acc.apply_grad([1], [[4.0]], once_per_worker=True).outcome == "repeated"
    slices = redisacc.IndexedSlices([[8.0]], [1])
    assert acc.apply_indexed_slices_grad(slices, once_per_worker=True).outcome == "repeated"
    assert not acc.info().once_per_worker
    assert acc.info().repeated == 2
    assert acc.take_grad(2)[1].tolist() == [[3.0]]


@pytest.mark.servers("fakeredis", "valkey")
def test_workers_of_one_name_at_the_same_time(open_dense_stored, background):
    number, rounds = 4, 5
    handles = [
        open_dense_stored("int64", [3], "twins", worker=f"w{k % 2}", reduction_type="SUM", once_per_worker=True)
        for k in range(number)
    ]
    barrier = threading.Barrier(number)

    def work(handle, step):
        barrier.wait(30)
        return handle.apply_grad(np.full(3, step + 1), local_step=step).outcome

    for step in range(rounds):
        jobs = [background(work, handle, step) for handle in handles]
        outcomes = sorted(job.result() for job in jobs)
        assert outcomes == ["applied", "applied", "repeated", "repeated"]
        with handles[0].take(2, timeout=30) as taken:
            assert taken.workers == {"w0": 1, "w1": 1}
            assert taken.gradient.tolist() == [2 * (step + 1)] * 3
    handles[0].delete()


@pytest.mark.servers("fakeredis")
def test_only_true_and_false_are_accepted(open_dense):
    acc = open_dense("float32", [1])
    for value in (1, 0, "yes", [], np.array([True])):
        with pytest.raises(redisacc.InvalidArgumentError, match="once_per_worker must be True or False"):
            open_dense("float32", [1], once_per_worker=value)
        with pytest.raises(redisacc.InvalidArgumentError, match="once_per_worker must be True or False"):
            acc.apply_grad([1.0], once_per_worker=value)
    assert acc.num_accumulated() == 0


@pytest.mark.servers("fakeredis", "valkey")
def test_an_event_says_so(open_dense):
    acc = open_dense("float32", [1], worker="ann", once_per_worker=True)
    with acc.events(timeout=10) as events:
        acc.apply_grad([1.0])
        acc.apply_grad([1.0], local_step=4)
        assert next(events).kind == "applied"
        event = next(events)
    assert (event.kind, event.global_step, event.num_accumulated, event.who) == ("repeated", 0, 1, "ann")
    assert event.details == {"local_step": "4"}
