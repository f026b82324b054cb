"""Ctrl-C at any moment of an apply: afterwards, the caller can tell exactly which gradients were counted."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import redisacc
from redisacc._protocol.partition_scripts import PartitionScripts
from redisacc._protocol.scripts import Scripts
from redisacc._redis.transport import Transport

PROGRAM = Path(__file__).with_name("interrupted_worker.py")


@pytest.mark.servers("valkey")
@pytest.mark.parametrize(
    ("limit", "size"), [(2048, 4), (0, 4), (0, 20_000)], ids=["in_place", "buffered_inline", "buffered_parts"]
)
def test_after_any_interrupt_the_caller_knows_what_was_counted(
    real_server, open_dense, background, everything, limit, size
):
    acc = open_dense("float32", [size], "interrupted")
    draws = random.Random(size + limit)
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(PROGRAM), real_server.url, str(limit), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            unreturned = 0
            for _ in range(150 if everything else 15):
                print(file=worker.stdin, flush=True)
                assert worker.stdout.readline() == "go\n"
                time.sleep(draws.uniform(0, 0.004))
                worker.send_signal(signal.SIGINT)
                said = answer(worker)
                assert said, worker.stderr.read()
                returned, applied, stale, unknown = map(int, said.split())
                info = acc.info()
                assert (applied, stale, unknown) == (info.applied, info.stale, 0)
                unreturned += applied + stale - returned
                if info.buffered_bytes > 10_000_000:
                    acc.take_grad(1)
                    acc.set_global_step(0)
            # Without settle(), the worker would have to guess these.
            assert unreturned
            worker.stdin.close()
            assert worker.wait(30) == 0
        finally:
            worker.kill()
    # Nothing arrives late.
    assert (applied, stale) == (acc.info().applied, acc.info().stale)
    acc.delete()


def answer(worker):
    """Returns what the worker says. Presses Ctrl-C again if that takes seconds, as a person would.

    Python ignores a KeyboardInterrupt that is raised in a destructor, and redis-py's parser has one.
    """
    while not select.select([worker.stdout], [], [], 8)[0]:
        worker.send_signal(signal.SIGINT)
    return worker.stdout.readline()


class Interrupt(BaseException):
    """What a signal handler raises."""


@pytest.fixture
def acc(open_dense_stored):
    acc = open_dense_stored("float32", [2], "interrupted")
    yield acc
    if acc in alive(acc):
        acc.delete()


def alive(acc):
    try:
        acc.num_accumulated()
    except redisacc.RedisAccError:
        return []
    return [acc]


@pytest.fixture
def interrupt(monkeypatch):
    """Interrupts the next script that counts a gradient, before it is sent or when its reply has arrived."""

    def arm(when):
        run = Transport.run_and_read

        def interrupted(self, script, *arguments, **options):
            if script.name not in ("apply", "buffer", "commit"):
                return run(self, script, *arguments, **options)
            monkeypatch.setattr(Transport, "run_and_read", run)
            if when == "after":
                run(self, script, *arguments, **options)
            raise Interrupt

        monkeypatch.setattr(Transport, "run_and_read", interrupted)

    return arm


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_apply_is_settled(acc, interrupt, when):
    acc.apply_grad([1, 1])
    interrupt(when)
    with pytest.raises(Interrupt):
        acc.apply_grad([2, 2])
    counted = 1 + (when == "after")
    assert acc.settle() == redisacc.Tally(counted, 0, 0, 0)
    assert acc.settle() == redisacc.Tally(counted, 0, 0, 0)
    assert acc.info().applied == counted
    acc.apply_grad([4, 4])
    assert acc.settle().applied == acc.info().applied == counted + 1
    # Its session is used again, so that interrupts do not fill the table.
    assert len(acc._transport.where.hkeys("redisacc:{interrupted}:sessions")) == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usual_storages("in_place")
def test_the_next_apply_settles_the_one_before(acc, interrupt, when):
    interrupt(when)
    with pytest.raises(Interrupt):
        acc.apply_grad([2, 2])
    acc.apply_grad([4, 4])
    tally = acc.settle()
    assert tally == redisacc.Tally(1 + (when == "after"), 0, 0, 0)
    assert acc.info().applied == tally.applied


@pytest.mark.usual_storages("in_place")
def test_a_copy_that_is_still_on_its_way_is_fenced(acc, monkeypatch):
    """The request that was interrupted arrives when it has been settled."""
    held = []
    run = Transport.run_and_read

    def hold(self, script, *arguments, **options):
        held.append((self, script, arguments, options))
        raise Interrupt

    monkeypatch.setattr(Transport, "run_and_read", hold)
    with pytest.raises(Interrupt):
        acc.apply_grad([2, 2])
    monkeypatch.setattr(Transport, "run_and_read", run)
    assert acc.settle() == redisacc.Tally(0, 0, 0, 0)
    ((transport, script, arguments, options),) = held
    reply, _ = run(transport, script, *arguments, **options)
    assert reply[0] == b"fenced"
    assert acc.info().applied == 0


@pytest.mark.usual_storages("in_place")
def test_each_thread_has_its_own_tally(acc, background, interrupt):
    acc.apply_grad([1, 1])
    interrupt("after")
    with pytest.raises(Interrupt):
        acc.apply_grad([1, 1])
    assert background(lambda: (acc.apply_grad([1, 1], local_step=-1), acc.settle())[1]).result() == redisacc.Tally(
        0, 1, 0, 0
    )
    assert acc.settle() == redisacc.Tally(2, 0, 0, 0)


@pytest.mark.usual_storages("in_place")
def test_what_cannot_be_learnt_any_more_is_counted_as_unknown(acc, interrupt):
    acc.apply_grad([1, 1])
    interrupt("after")
    with pytest.raises(Interrupt):
        acc.apply_grad([1, 1])
    acc.delete()
    assert acc.settle() == redisacc.Tally(1, 0, 0, 1)


@pytest.mark.usual_storages("in_place")
def test_a_silent_server_leaves_the_request_open(acc, interrupt, monkeypatch):
    interrupt("after")
    with pytest.raises(Interrupt):
        acc.apply_grad([1, 1])

    def silent(self, **options):
        raise redisacc.ServerUnavailableError("silent")

    with monkeypatch.context() as patch:
        patch.setattr(Scripts, "resolve", silent)
        with pytest.raises(redisacc.ServerUnavailableError):
            acc.settle()
        # Otherwise, this one would make the outcome of the other unknowable.
        with pytest.raises(redisacc.ServerUnavailableError):
            acc.apply_grad([2, 2])
    assert acc.settle().applied == acc.info().applied == 1


@pytest.mark.usual_storages("in_place")
def test_refused_gradients_are_not_counted(acc):
    acc.apply_grad([1, 1])
    with pytest.raises(redisacc.InvalidArgumentError):
        acc.apply_grad([1, 1, 1])
    acc.apply_grad([1, 1], local_step=-1)
    acc.set_global_step(3)
    acc.take_grad(1)
    assert acc.settle() == redisacc.Tally(1, 1, 0, 0)


@pytest.mark.servers("valkey")
@pytest.mark.usual_storages("in_place")
def test_an_interrupted_retry_is_counted_once(acc, monkeypatch):
    def silent(self, *arguments, **options):
        self._transport._losses.count += 1
        raise redisacc.ServerUnavailableError("silent")

    def interrupted(send):
        def run(self, *arguments, **options):
            send(self, *arguments, **options)
            raise Interrupt

        return run

    ways = {(Scripts, "apply"): Scripts.apply, (Scripts, "buffer"): Scripts.buffer}
    ways[PartitionScripts, "commit"] = PartitionScripts.commit
    with monkeypatch.context() as patch:
        for way in ways:
            patch.setattr(*way, silent)
        with pytest.raises(redisacc.OutcomeUnknownError) as unknown:
            acc.apply_grad([1, 1])
    assert acc.settle() == redisacc.Tally(0, 0, 0, 0)
    with monkeypatch.context() as patch:
        for way, send in ways.items():
            patch.setattr(*way, interrupted(send))
        with pytest.raises(Interrupt):
            unknown.value.retry()
    assert acc.settle() == redisacc.Tally(1, 0, 0, 0)
    acc.apply_grad([2, 2])
    assert unknown.value.retry().outcome == "applied"
    assert acc.settle().applied == acc.info().applied == 2


@pytest.mark.usual_storages("in_place")
def test_a_child_after_a_fork_settles_nothing_of_its_parent(acc, interrupt, monkeypatch):
    interrupt("after")
    with pytest.raises(Interrupt):
        acc.apply_grad([1, 1])
    assert len(acc._requests._ledgers.mine().open) == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert acc._requests._ledgers.mine().open == ()
    assert acc._requests._ledgers.mine().tally == redisacc.Tally(0, 0, 0, 0)


@pytest.mark.usual_storages("in_place")
def test_a_handler_that_applies_in_the_middle_of_an_apply_disturbs_nothing(acc, monkeypatch):
    run = Transport.run_and_read

    def handle(self, script, *arguments, **options):
        monkeypatch.setattr(Transport, "run_and_read", run)
        acc.apply_grad(np.full(2, 8.0))
        return run(self, script, *arguments, **options)

    monkeypatch.setattr(Transport, "run_and_read", handle)
    assert acc.apply_grad([1, 1]).num_accumulated == 2
    assert acc.settle() == redisacc.Tally(2, 0, 0, 0)
