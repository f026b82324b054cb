"""Leases: there is one chief, and one process of each number, however long one of them stands still."""

import os
import signal
import socket
import sys

import numpy as np
import pytest
from support.leaks import remaining
from support.servers import contents
from support.warm_python import PIPE, WarmPython

import redisacc

# How long a lease lasts, and how often its holder extends it, in seconds.
LEASE, RENEWAL = 10.0, 2.5
REMEDY = r".*\. Stop that process first, or leave this one out"
ITSELF = r".*: close\(\) the object that holds the lease"


def without_leases(client):
    return {key: value for key, value in contents(client).items() if not key.endswith(b":crew")}


def test_a_second_chief_is_refused_and_changes_nothing(training, clock):
    first = training.chief()
    one = training.work()
    before = without_leases(training.client)
    with (
        clock.running(),
        pytest.raises(
            redisacc.ConflictError,
            match=rf"{os.getpid()} is the chief of 'train' and extends its lease, {REMEDY}; or give it standby=True",
        ),
    ):
        training.chief({"other": np.zeros(3)})
    # The worker has applied its gradient meanwhile, or not.
    assert without_leases(training.client).keys() >= before.keys()
    training.lead(first, 2)
    one.join()
    assert first.parameters["w"].tolist() == [2, 1]


def test_a_number_in_use_is_refused(training, clock):
    training.worker(2)
    began = clock.now()
    with (
        clock.running(),
        pytest.raises(
            redisacc.ConflictError,
            match=rf"\w:\d+ is the worker 2 of 'train' and extends its lease, {REMEDY}{ITSELF}",
        ),
    ):
        training.worker(2)
    assert clock.now() - began >= 1.0
    assert list(training.leases) == ["worker 2"]


def test_the_lease_of_a_dead_process_is_waited_for(training, caplog, clock):
    with clock.running():
        training.give_lease("chief", "host:1", 9_500)
        chief = training.chief()
        training.give_lease("worker 0", "host:2", 9_500)
        worker = training.worker(0)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "train: host:1 held the lease of the chief last",
        "train: host:2 held the lease of the worker 0 last",
    ]
    one = training.work(worker)
    training.lead(chief, 1)
    one.join()


def test_a_lease_far_in_the_future_is_refused_at_once(training):
    training.give_lease("worker 0", "host:1", 10**9)
    with pytest.raises(redisacc.ConflictError, match="host:1 is the worker 0"):
        training.worker(0)
    # Without a number, there are others.
    assert training.worker().number == 1


def test_a_successor_of_the_same_place_takes_over_at_once(training, monkeypatch, caplog):
    monkeypatch.setenv("REDISACC_RUN_ID", "a-place")
    first = training.worker(0)
    # As if it had been killed.
    second = training.worker(0)
    assert caplog.records == []
    assert list(training.leases) == ["worker 0"]
    first.close()
    second.close()


def test_a_lease_that_has_run_out_too_early_is_not_taken(training, background, until, durations, caplog):
    """It came with older data. Its holder lives, and extends it again."""
    caplog.set_level("INFO")
    durations(standby_asks_every=0.01)

    def looks():
        return training.client.info("commandstats").get("cmdstat_time", {}).get("calls", 0)

    training.give_lease("chief", "host:1", 9_500)
    successor = background(lambda: training.chief(standby=True))
    until(lambda: "standing by to follow it" in caplog.text)
    training.give_lease("chief", "host:1", -1_000)
    before = looks()
    until(lambda: looks() > before + 2)
    assert "other" in training.leases["chief"]
    training.give_lease("chief", "host:1", 9_500, process=training.dead_process())
    successor.result(60)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_leases_of_killed_processes_of_this_machine_are_taken_at_once(training, caplog):
    dead = training.dead_process()
    for place in ("chief", "worker 0", "worker 1", "worker 3"):
        training.give_lease(place, "host:1", 10**9, process=dead)
    training.give_lease("worker 2", "host:2", 10**9)
    training.chief()
    assert [training.worker(number).number for number in (None, 3, None, None)] == [0, 3, 1, 4]
    assert caplog.records == []
    assert "other" not in str({place: who for place, who in training.leases.items() if place != "worker 2"})


def test_a_worker_that_is_started_again_in_its_place_keeps_its_number(training, monkeypatch):
    monkeypatch.setenv("REDISACC_RUN_ID", "a-place")
    training.give_lease("worker 0", "host:1", 10**9)
    # That of its predecessor, whether its lease has run out or not.
    for ms in (10**9, -60_000):
        training.give_lease("worker 4", "host:1", ms, holder="a-place")
        worker = training.worker()
        assert worker.number == 4
        worker.close()
    # What somebody else has taken since is not its own any more.
    training.give_lease("worker 4", "host:2", 10**9)
    assert training.worker().number == 1


def test_workers_that_live_in_one_place_have_numbers_of_their_own(training, monkeypatch):
    """A program may hand its environment to several processes, or begin two workers in one."""
    monkeypatch.setenv("REDISACC_RUN_ID", "a-place")
    assert [training.worker().number for _ in range(3)] == [0, 1, 2]


def test_a_worker_whose_number_is_taken_ends(training, clock):
    training.chief()
    worker = training.worker(0)
    steps = worker.steps()
    next(steps)
    training.give_lease("worker 0", "host:9", 60_000)
    clock.advance(RENEWAL)
    with pytest.raises(redisacc.ConflictError, match=r"was the worker 0 but .* host:9 is the worker 0 now"):
        worker.apply({"w": [1, 1]})
    with pytest.raises(redisacc.ConflictError, match="could not extend its lease"):
        next(steps)
    worker.close()
    # It is not his to give back.
    assert "host:9" in training.leases["worker 0"]


def test_a_worker_that_waits_notices_that_its_number_is_taken(training, clock):
    training.chief(workers=2)
    worker = training.worker(0)
    one = training.work(worker)
    training.give_lease("worker 0", "host:9", 60_000)
    clock.advance(RENEWAL)
    with pytest.raises(redisacc.ConflictError, match="host:9"):
        one.result()


def test_a_chief_that_waits_notices_that_it_has_been_replaced(training, background, until, clock):
    chief = training.chief()
    waiting = background(training.lead, chief, 1)
    until(lambda: training.client.zcard("redisacc:{train}:queue"))
    training.give_lease("chief", "host:9", 60_000)
    clock.advance(RENEWAL)
    with pytest.raises(redisacc.ConflictError, match=r"was the chief but .* host:9 is the chief now"):
        waiting.result()
    # Nobody waits for it in the queue.
    assert training.client.zcard("redisacc:{train}:queue") == 0
    with pytest.raises(redisacc.ConflictError, match="could not extend its lease"):
        chief.finish()


@pytest.fixture
def cut_off(proxy, clock):
    """Cuts processes off from the server for longer than their leases last."""

    def cut():
        proxy.refuses = True
        proxy.cut_all()
        clock.advance(LEASE)
        proxy.refuses = False

    return cut


def test_after_a_pause_a_lease_is_checked_before_anything_is_done(training, proxy, cut_off):
    chief, worker = training.chief(redis=proxy.where), training.worker(0, redis=proxy.where)
    next(worker.steps())
    worker.apply({"w": [1, 1]})
    for taken in chief.rounds():
        cut_off()
        # Nobody has taken them meanwhile.
        chief.publish({"w": taken.gradient["w"]})
        break
    cut_off()
    training.give_lease("chief", "host:8", 60_000)
    training.give_lease("worker 0", "host:9", 60_000)
    before = without_leases(training.client)
    with pytest.raises(redisacc.ConflictError, match="host:8"):
        next(chief.rounds())
    with pytest.raises(redisacc.ConflictError, match="host:8"):
        chief.finish()
    with pytest.raises(redisacc.ConflictError, match="host:9"):
        worker.apply({"w": [1, 1]})
    assert without_leases(training.client) == before


def test_a_chief_that_was_cut_off_while_another_one_led_the_training_to_its_end(training, proxy, cut_off):
    """The other one has given the lease back, so it is free again."""
    old, one = training.chief(redis=proxy.where), training.work()
    cut_off()
    with training.chief() as new:
        training.lead(new, 2)
    one.join()
    before = without_leases(training.client)
    # On a busy machine, it has noticed by now that it cannot extend its lease.
    sees = r"published step 2, while .* was at step 0: .* continues with|could not extend its lease"
    for until in (None, 1, 5):
        with pytest.raises(redisacc.ConflictError, match=sees):
            next(old.rounds(until))
    assert without_leases(training.client) == before


def test_a_chief_gets_a_round_that_its_predecessor_takes_after_a_pause(training, background):
    """A chief that stood still may be granted a round before it notices, while its successor waits for that round."""
    chief, worker = training.chief(), training.worker()
    steps = worker.steps()
    next(steps)
    worker.apply({"w": [1, 1]})
    rounds = chief.rounds(until=2)
    chief.publish({"w": next(rounds).gradient["w"]})
    assert next(steps)[0] == 1
    worker.apply({"w": [2, 2]})
    block = training.gradients().take(1, timeout=20)
    assert block.__enter__().global_step == 1
    again = background(next, rounds).result()
    with pytest.raises(redisacc.ConflictError, match="Do not use its gradient"):
        block.__exit__(None, None, None)
    assert (again.global_step, again.gradient["w"].tolist()) == (1, [2, 2])
    chief.publish({"w": chief.parameters["w"] + again.gradient["w"]})
    assert list(rounds) == []
    assert chief.parameters["w"].tolist() == [3, 3]


PROGRAM = """
import sys
import redisacc
with redisacc.Worker("train", number=0, redis=sys.argv[1]) as worker:
    for step, parameters in worker.steps():
        print(step, flush=True)
        sys.stdin.readline()
        try:
            print(worker.apply({"w": [100, 100]}).outcome, flush=True)
        except redisacc.ConflictError as error:
            print(error, flush=True)
            break
"""


def test_a_process_that_was_stopped_for_longer_than_its_lease(training, real_server, clock):
    chief = training.chief()
    with WarmPython(["-c", PROGRAM, real_server.url], stdin=PIPE, stderr=sys.stderr, text=True, env=clock.env) as old:
        assert old.stdout.readline() == "0\n"
        old.send_signal(signal.SIGSTOP)
        with clock.running():
            one = training.work(training.worker(0))
        training.lead(chief, 2)
        one.join()
        old.send_signal(signal.SIGCONT)
        old.stdin.write("\n")
        said, _ = old.communicate(timeout=30)
    assert "is the worker 0 now. This process can no longer be the worker 0" in said or said == "stale\n"
    assert chief.parameters["w"].tolist() == [2, 1]


def test_leases_are_not_extended_after_the_training_was_deleted(training, clock):
    chief, _ = training.chief(), training.worker()
    clock.advance(RENEWAL)
    assert sorted(training.leases) == ["chief", "worker 0"]
    chief.delete()
    clock.advance(RENEWAL)
    assert remaining(training.client) == []


def test_a_renewal_gives_up_soon_if_the_server_is_gone(training, proxy, clock):
    """It asks what has become of a training that is gone. Without a limit, its thread would outlive this test."""
    training.chief(redis=proxy.url)
    training.client.flushall()
    proxy.before("HMGET", proxy.close)
    clock.advance(RENEWAL)
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", proxy.port))


def test_a_worker_of_a_deleted_training_has_no_number_in_the_next_one(training, clock):
    chief, worker = training.chief(), training.worker()
    next(worker.steps())
    chief.delete()
    chief.close()
    again = training.chief()
    clock.advance(RENEWAL)
    assert list(training.leases) == ["chief"]
    assert training.worker().number == 0
    clock.advance(RENEWAL)
    assert again.step == 0


def test_a_lease_that_the_server_has_lost_is_taken_again_in_the_training_that_is_restored(training, clock):
    _, worker = training.chief(), training.worker()
    next(worker.steps())
    training.client.hdel("redisacc:{train}:crew", "chief", "worker 0")
    clock.advance(RENEWAL)
    assert sorted(training.leases) == ["chief", "worker 0"]


def test_a_worker_that_waits_for_its_chief_takes_its_lease_again_when_the_server_has_lost_it(training, clock, until):
    worker = training.worker()
    training.client.flushall()
    clock.advance(LEASE)
    assert remaining(training.client) == []
    one = training.work(worker)
    until(lambda: list(training.leases) == ["worker 0"])
    training.lead(training.chief(), 1)
    one.join()


def test_a_lease_of_a_dead_predecessor_comes_back_with_older_data(training):
    worker = training.worker(0)
    training.give_lease("worker 0", "host:1", 9_500, process=training.dead_process())
    worker._lease.renew()
    worker._lease.check()
    assert "host:1" not in training.leases["worker 0"]
