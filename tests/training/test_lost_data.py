"""A server that has lost data: nothing hangs, and the training goes on where that is possible; else it says why not."""

import threading

import numpy as np
import pytest
from support.selection import ONE_NODE
from support.servers import Snapshot

import redisacc

# Older data are restored by a transaction that begins with FLUSHALL.
pytestmark = [pytest.mark.servers(*ONE_NODE), pytest.mark.usefixtures("time_runs")]


@pytest.fixture
def at_step(training, background, until):
    """Trains with two workers in the background up to a step and lets a function work between two steps of the chief.

    The test's functions are called when the chief has published their step. Returns the chief at the end.
    """

    def train(last, deeds, **options):
        chief = training.chief(workers=2, state={"m": np.array(0)}, **options)
        crew = [training.work(gradient=lambda _number, step, _: {"w": [1, step]}) for _ in range(2)]
        for _ in chief.rounds(until=last):
            chief.publish({"w": chief.parameters["w"] + 1}, state={"m": np.array(chief.step)})
            if chief.step in deeds:
                deeds.pop(chief.step)()
        for one in crew:
            one.join()
        return chief

    return train


def test_it_is_restarted_from_older_data_after_the_last_step(training, at_step):
    kept = []
    chief = at_step(5, {2: lambda: kept.append(Snapshot(training.client)), 5: lambda: [old.restore() for old in kept]})
    with redisacc.Parameters("train", redis=training.client) as parameters:
        step, tree = parameters.latest()
        assert (step, tree["w"].tolist()) == (5, [5, 5]) == (chief.step, chief.parameters["w"].tolist())
        assert parameters.finished()
    assert training.record[b"global_step"] == b"5"
    assert training.client.hlen("redisacc:{train}:taken") == 0


def test_a_gradient_that_the_chief_throws_away_with_older_ones_is_applied_again(
    training, background, until, proxy, caplog
):
    """It comes after the chief has set the step, and before it looks whether gradients of earlier steps are there."""
    chief = training.chief(redis=proxy.where)
    worker = training.worker()
    steps, rounds = worker.steps(), chief.rounds()
    for step in range(4):
        if step == 2:
            training.client.hdel("redisacc:{train}:parameters", "workers")
            kept = Snapshot(training.client)
        assert next(steps)[0] == step
        worker.apply({"w": [1, step]})
        next(rounds)
        chief.publish({"w": chief.parameters["w"] + 1})
    waiting = background(next, rounds)
    until(lambda: training.client.zcard("redisacc:{train}:queue"))
    assert next(steps)[0] == 4
    has_come = threading.Event()

    def apply():
        worker.apply({"w": [7, 7]})
        has_come.set()

    # It sets the step before, ends that with an empty round, and sets this one.
    proxy.after("set_global_step", lambda: None)
    proxy.after("set_global_step", apply)
    kept.restore()
    assert has_come.wait(20)
    background(next, steps)
    taken = waiting.result()
    assert (taken.global_step, taken.num_accumulated, taken.gradient["w"].tolist()) == (4, 1, [7, 7])
    assert (
        "the gradient of step 4 is not in the round, because the server has lost it; applying it again" in caplog.text
    )
    # The chief has made the server agree with it, also about how many workers there are.
    assert worker.workers == 1


def test_older_gradients_that_come_back_are_not_used(training, background, until):
    """The round of step 1 comes back, with a gradient that has been used; the step is 3."""
    chief = training.chief(workers=2)
    first, second = training.worker(0), training.worker(1)
    mine, yours = first.steps(), second.steps()
    rounds = chief.rounds()
    for step in range(3):
        next(mine), next(yours)
        first.apply({"w": [100, 100]})
        if step == 1:
            kept = Snapshot(training.client)
        second.apply({"w": [1000, 1000]})
        next(rounds)
        chief.publish({"w": chief.parameters["w"] + 1})
    assert chief.step == 3
    assert next(mine)[0] == next(yours)[0] == 3
    kept.restore()
    waiting = background(next, rounds)
    until(lambda: training.record.get(b"global_step") == b"3")
    first.apply({"w": [1, 1]})
    second.apply({"w": [2, 2]})
    taken = waiting.result()
    assert (taken.global_step, taken.gradient["w"].tolist()) == (3, [3, 3])
    chief.publish({"w": chief.parameters["w"] + 1})
    assert list(chief.rounds(until=4)) == []
    # The round that came back was acknowledged, too.
    assert training.client.hlen("redisacc:{train}:taken") == 0


def test_a_gradient_that_the_server_has_lost_is_applied_again(training, background, until):
    chief = training.chief(workers=2)
    one = training.work(training.worker(0))
    until(lambda: training.record.get(b"num_accumulated") == b"1")
    two = training.worker(1)
    step = two.steps()
    next(step)
    # As if the server had been restarted without the last second.
    training.client.delete("redisacc:{train}:sums", "redisacc:{train}:workers", "redisacc:{train}:buffered")
    training.client.delete("redisacc:{train}:inline", "redisacc:{train}:sessions")
    training.client.hset("redisacc:{train}", "num_accumulated", 0)
    until(lambda: training.record.get(b"num_accumulated") == b"1")
    two.apply({"w": [1, 5]})
    for taken in chief.rounds(until=1):
        assert taken.gradient["w"].tolist() == [2, 5]
        chief.publish({"w": taken.gradient["w"]})
    one.join()


def test_a_worker_goes_back_with_the_parameters(training, background, until, caplog):
    """Chief and server were restarted, from older data: there is nobody who could restore the later ones."""
    chief = training.chief()
    worker = training.worker()
    steps = worker.steps()
    rounds = chief.rounds()
    for step in range(3):
        next(steps)
        if step == 1:
            kept = Snapshot(training.client)
        worker.apply({"w": [1, step]})
        next(rounds)
        chief.publish({"w": chief.parameters["w"] + 1})
    assert next(steps)[0] == 3
    rounds.close()
    chief.close()
    waiting = background(next, steps)
    kept.restore()
    other = training.chief()
    assert other.step == 1
    assert waiting.result()[0] == 1
    assert "the server has lost the parameters of step 3; continuing" in caplog.text
    worker.apply({"w": [1, 1]})
    for taken in other.rounds(until=2):
        assert taken.global_step == 1
        other.publish({"w": other.parameters["w"] + taken.gradient["w"]})


def test_waits_end_when_the_training_is_deleted(training, background, until):
    chief, worker = training.chief(), training.worker()
    steps = worker.steps()
    next(steps)
    rounds = chief.rounds()
    waiting = [background(next, rounds), background(next, steps)]
    until(lambda: training.client.zcard("redisacc:{train}:queue"))
    training.gradients().delete()
    redisacc.Parameters("train", redis=training.client).delete()
    for one in waiting:
        with pytest.raises(redisacc.NotFoundError, match="deleted"):
            one.result()
    with pytest.raises(redisacc.NotFoundError):
        worker.apply({"w": [1, 1]})


def test_another_handle_continues_after_a_loss(training, background, until, caplog):
    chief = training.chief()
    with redisacc.Parameters("train", redis=training.client) as parameters:
        assert parameters.latest()[0] == 0
        training.client.flushall()
        with pytest.raises(redisacc.NotFoundError, match="or the server has lost its data"):
            parameters.latest()
        rounds = chief.rounds()
        waiting = background(next, rounds)
        until(lambda: training.client.exists("redisacc:{train}:parameters"))
        assert parameters.latest()[0] == 0
        assert "the server has lost this run: it was flushed" in caplog.text
        chief.close()
        with pytest.raises(redisacc.CancelledError):
            waiting.result()


CLAIMS = "redisacc:{train}:parameters:claims"


def emptied_without_a_chief(training, background, steps=3):
    """Trains for some steps with two workers, of which one lags a step behind; then there is neither chief nor data."""
    chief = training.chief(state={"m": np.array(7)})
    ahead, behind = training.worker(0), training.worker(1)
    first, second = ahead.steps(), behind.steps()
    rounds = chief.rounds()
    for step in range(steps):
        assert next(first)[0] == step
        if step == steps - 1:
            assert next(second)[0] == step
        ahead.apply({"w": [1, 1]})
        next(rounds)
        chief.publish({"w": chief.parameters["w"] + 1}, state={"m": np.array(step)})
    assert next(first)[0] == steps
    rounds.close()
    chief.close()
    training.client.flushall()
    return ahead, first, behind, second


@pytest.mark.loses_data
def test_a_chief_that_finds_nothing_asks_the_workers(training, background, until, caplog):
    ahead, first, behind, second = emptied_without_a_chief(training, background)
    waiting = [background(next, first), background(next, second)]
    chief = training.chief({"w": np.full(2, 50)}, state={"m": np.array(-1)})
    assert (chief.step, chief.parameters["w"].tolist(), chief.state["m"].item()) == (3, [3, 3], -1)
    assert "continuing at step 3 with the parameters of a living worker. The state of the chief" in caplog.text
    assert "published step 3, which this worker had" in caplog.text
    # The other one gets it as its next step.
    assert waiting[1].result()[0] == 3
    rounds = chief.rounds()
    for one, gradient in ((ahead, [1, 2]), (behind, [4, 8])):
        one.apply({"w": gradient})
        taken = next(rounds)
        chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
        if one is ahead:
            assert waiting[0].result()[0] == 4
            assert next(second)[0] == 4
    assert training.client.exists("redisacc:{train}:parameters:claims") == 0


@pytest.mark.loses_data
def test_a_chief_that_stood_by_continues_what_the_server_has_lost(training, background, until, caplog):
    """The node of the chief's host dies with it, and comes back empty."""
    caplog.set_level("INFO")
    first = training.chief()
    successor = background(lambda: training.chief(standby=True))
    until(lambda: "is the chief; standing by to follow it" in caplog.text)
    seen = []
    one = training.work(gradient=lambda _, step, __: seen.append(step) or {"w": [1, step]})
    for taken in first.rounds():
        first.publish({"w": first.parameters["w"] + taken.gradient["w"]})
        if first.step == 2:
            break
    until(lambda: 2 in seen)
    training.client.flushall()
    second = successor.result(60)
    assert (second.step, second.parameters["w"].tolist()) == (2, [2, 1])
    training.lead(second, 4)
    assert one.result(60)[1][-1] == 3


@pytest.mark.loses_data
def test_one_that_follows_asks_before_it_begins_at_step_0(training, monkeypatch, caplog):
    """Even if it is the first process in its place, since another one is known to have led."""
    monkeypatch.setenv("REDISACC_RESTARTED", "0")
    caplog.set_level("INFO")
    training.give_lease("chief", "host:1", 9_500)
    training.chief(standby=True)
    assert "asking for 3.5 s whether a worker still has a run of this name" in caplog.text


def test_one_that_is_started_again_asks_before_it_begins_at_step_0(training, monkeypatch, caplog):
    """However long the server has been there: it may be a replica that lagged, or may have waited for other nodes."""
    monkeypatch.setenv("REDISACC_RESTARTED", "1")
    caplog.set_level("INFO")
    training.chief()
    assert "asking for 3.5 s whether a worker still has a run of this name" in caplog.text


@pytest.mark.loses_data
def test_workers_that_compute_claim_what_they_have(training, background, until):
    """The thread that extends the lease claims. The worker publishes when it applies its gradient."""
    ahead, _first, _, _ = emptied_without_a_chief(training, background)
    until(lambda: training.client.hexists(CLAIMS, "worker 0"))
    opening = background(training.chief, {"w": np.full(2, 50)})
    until(lambda: training.client.hget(CLAIMS, "asked") == b"worker 0")
    applying = background(ahead.apply, {"w": [5, 5]})
    chief = opening.result()
    assert (chief.step, chief.parameters["w"].tolist()) == (3, [3, 3])
    applying.result()
    assert next(chief.rounds()).gradient["w"].tolist() == [5, 5]


@pytest.mark.loses_data
def test_no_worker_hands_over_what_it_has(training, background, until):
    ahead, _first, behind, _second = emptied_without_a_chief(training, background)
    until(lambda: training.client.hlen(CLAIMS) == 2)
    opening = background(training.chief, {"w": np.full(2, 50)})
    until(lambda: training.client.hget(CLAIMS, "asked") == b"worker 0")
    # As if both had been killed a while ago.
    ahead.close()
    behind.close()
    stale = {f"worker {number}": f"{number} {'0' * 32} 0 elsewhere.1.1" for number in range(2)}
    training.client.hset(CLAIMS, mapping=stale)
    with pytest.raises(
        redisacc.DataLossError,
        match=r"worker 0 had step 3 .* Start the chief again with a checkpoint; or, to begin again at step 0, stop the "
        "workers first",
    ):
        opening.result(60)
    assert not training.client.exists("redisacc:{train}:parameters")


@pytest.mark.loses_data
def test_the_newest_worker_dies_before_it_hands_over(training, background, until):
    ahead, _first, behind, second = emptied_without_a_chief(training, background)
    until(lambda: training.client.hlen(CLAIMS) == 2)
    opening = background(training.chief, {"w": np.full(2, 50)})
    until(lambda: training.client.hget(CLAIMS, "asked") == b"worker 0")
    ahead.close()
    waiting = background(next, second)
    chief = opening.result(60)
    assert (chief.step, chief.parameters["w"].tolist()) == (2, [2, 2])
    chief.close()
    behind.close()
    with pytest.raises((redisacc.CancelledError, redisacc.ConflictError)):
        waiting.result()


def the_other_hands_over(training, background, other):
    """A new process has the number of the worker that was ahead, and the chief gets step 2 from the other worker."""
    assert training.worker().number == 0
    waiting = background(next, other)
    chief = training.chief({"w": np.full(2, 50)})
    assert (chief.step, chief.parameters["w"].tolist()) == (2, [2, 2])
    training.close()
    with pytest.raises((redisacc.CancelledError, redisacc.ConflictError)):
        waiting.result()


@pytest.mark.loses_data
def test_a_worker_takes_the_place_of_one_that_died_after_it_had_claimed(training, background, until):
    """Nobody waits for the dead one to hand over what it had."""
    ahead, _first, _behind, second = emptied_without_a_chief(training, background)
    until(lambda: training.client.hlen(CLAIMS) == 2)
    step, incarnation, claimed_ms, _ = training.client.hget(CLAIMS, "worker 0").decode().split()
    assert step == "3"
    ahead.close()
    assert training.client.hkeys(CLAIMS) == [b"worker 1"]
    # As if it had been killed instead, and had then been started again.
    entry = f"{step} {incarnation} {int(claimed_ms) + 10**9} {training.dead_process()}"
    training.client.hset(CLAIMS, "worker 0", entry)
    the_other_hands_over(training, background, second)


@pytest.mark.loses_data
def test_a_claim_of_a_process_of_another_machine_ends_when_it_claims_no_more(training, background, until, caplog):
    ahead, _first, _behind, second = emptied_without_a_chief(training, background)
    until(lambda: training.client.hlen(CLAIMS) == 2)
    step, incarnation, claimed_ms, _ = training.client.hget(CLAIMS, "worker 0").decode().split()
    ahead.close()
    training.client.hset(CLAIMS, "worker 0", f"{step} {incarnation} {claimed_ms} {'0' * 16}.1.1")
    the_other_hands_over(training, background, second)


def test_a_gradient_of_weights_that_are_lost_does_not_count(training):
    """Its worker has not noticed that the server went back, and the round is of an earlier step."""
    chief, worker = training.chief(), training.worker()
    steps, rounds = worker.steps(), chief.rounds()
    next(steps)
    kept = Snapshot(training.client)
    worker.apply({"w": [1, 1]})
    next(rounds)
    chief.publish({"w": [1, 1]})
    next(steps)
    kept.restore()
    assert worker.apply({"w": [7, 7]}).outcome == "stale"
    assert training.gradients().num_accumulated() == 0


def test_older_data_have_an_accumulator_that_this_chief_never_opened(training):
    """Its predecessor made another one after a loss. The older one is no sign of a deletion."""
    first, one = training.chief(), training.work()
    rounds = first.rounds()
    next(rounds)
    first.publish({"w": [1, 1]})
    kept = Snapshot(training.client, lasting=True)
    training.client.flushall()
    next(rounds)
    first.publish({"w": [2, 2]})
    rounds.close()
    first.close()
    second = training.chief()
    kept.restore()
    training.lead(second, 4)
    assert second.step == 4
    one.join()


def test_everything_is_lost_before_a_worker_begins_its_loop(training, background):
    chief, worker = training.chief(), training.worker()
    training.client.flushall()
    beginning, taking = background(next, worker.steps()), background(next, chief.rounds())
    assert beginning.result(30)[0] == 0
    worker.apply({"w": [1, 1]})
    assert taking.result(30).gradient["w"].tolist() == [1, 1]


@pytest.mark.forges
def test_older_data_have_another_leader(training):
    """It continues with them, so the one that has led since restores nothing: two would lead."""
    chief, worker = training.chief(), training.worker()
    rounds, steps = chief.rounds(), worker.steps()
    kept = Snapshot(training.client)
    next(steps)
    worker.apply({"w": [1, 1]})
    next(rounds)
    chief.publish({"w": [1, 1]})
    kept.restore()
    training.give_lease("chief", "host:9", 60_000)
    with pytest.raises(redisacc.ConflictError, match="host:9 is the chief now"):
        next(rounds)
    assert training.client.hget("redisacc:{train}:parameters", "step") == b"0"


def test_workers_of_a_deleted_training_claim_nothing(training, background, until):
    chief, worker = training.chief(), training.worker()
    steps = worker.steps()
    next(steps)
    chief.delete()
    chief.close()
    again = training.chief({"w": np.full(2, 5)})
    assert (again.step, again.parameters["w"].tolist()) == (0, [5, 5])
    with pytest.raises(redisacc.NotFoundError, match="deleted and published again"):
        worker.apply({"w": [1, 1]})


def test_a_worker_joins_a_training_that_was_begun_again(training, proxy, caplog):
    """By a chief that did not hear of the worker, which was cut off."""
    worker = training.worker(redis=proxy.where)
    chief = training.chief()
    steps = worker.steps()
    next(steps)
    chief.close()
    proxy.refuses = True
    proxy.cut_all()
    training.client.flushall()
    again = training.chief({"w": np.full(2, 5)})
    proxy.refuses = False
    assert not worker.apply({"w": [100, 100]})
    step, tree = next(steps)
    assert (step, tree["w"].tolist()) == (0, [5, 5])
    assert "a chief has begun this run again from other parameters" in caplog.text
    worker.apply({"w": [1, 1]})
    assert next(again.rounds()).gradient["w"].tolist() == [1, 1]


def test_only_the_accumulator_was_deleted(training):
    chief = training.chief()
    one = training.work()
    training.lead(chief, 2)
    one.join()
    training.gradients().delete()
    with pytest.raises(redisacc.NotFoundError):
        training.lead(chief, 3)
    chief.close()
    again = training.chief()
    more = training.work()
    training.lead(again, 3)
    more.join()
    assert again.parameters["w"].tolist() == [3, 3]


def test_a_round_that_no_process_has_any_longer(training, caplog):
    """A leader that dies after a loss, with the round in the body of its loop, leaves an accumulator that is ahead."""
    chief, worker = training.chief(), training.worker()
    steps = worker.steps()
    next(steps)
    worker.apply({"w": [1, 2]})
    with training.gradients().take(1):
        pass
    assert training.record[b"global_step"] == b"1"
    more = training.work(worker)
    training.lead(chief, 3)
    more.join()
    assert chief.parameters["w"].tolist() == [3, 2 + 1 + 2]
    assert "step 1 has begun without its parameters. Beginning step 0 again" in caplog.text


def test_a_leader_that_is_none_ends_no_later_step(training):
    """An older lease may have come back with older data, so that two processes lead: one of them has the round."""
    chief, worker = training.chief(), training.worker()
    next(worker.steps())
    worker.apply({"w": [1, 2]})
    with training.gradients().take(1):
        pass
    entry = training.client.hget("redisacc:{train}:crew", "chief").split(b" ", 1)
    training.client.hset("redisacc:{train}:crew", "chief", b" ".join([b"other", entry[1]]))
    with pytest.raises(redisacc.ConflictError, match="is the chief now"):
        next(chief.rounds())
    assert training.record[b"global_step"] == b"1"


def test_somebody_else_has_published(training):
    chief = training.chief()
    with redisacc.Parameters("train", redis=training.client) as parameters:
        parameters.publish({"w": np.ones(2, np.int64)}, 4)
    with pytest.raises(redisacc.ConflictError, match=r"another process has published step 4, while .* was at step 0"):
        next(chief.rounds())


def test_a_round_that_was_recovered_by_somebody_else(training):
    """Its new owner may use it otherwise, so what follows from it here is not published."""
    chief, worker = training.chief(), training.worker()
    next(worker.steps())
    worker.apply({"w": [1, 1]})
    rounds = chief.rounds()
    taken = next(rounds)
    with training.gradients().recover():
        pass
    with pytest.raises(redisacc.ConflictError, match="the round of step 0 does not belong to this take any more"):
        chief.publish(taken.gradient)
    rounds.close()
    with redisacc.Parameters("train", redis=training.client) as parameters:
        assert parameters.step() == 0


@pytest.mark.parametrize("lost", ["the round", "everything", "the last second"])
def test_a_round_that_is_lost_while_the_program_has_it(training, background, lost):
    """What follows from it is published all the same. Its gradients, which may be back, do not count again."""
    # The parts are more than a script frees itself.
    size = 600_000
    chief = training.chief({"w": np.zeros(size, np.int64)}, limits=redisacc.Limits(in_place=0))
    worker = training.worker()
    steps, rounds = worker.steps(), chief.rounds(until=2)
    next(steps)
    worker.apply({"w": np.ones(size, np.int64)})
    kept = Snapshot(training.client)
    taken = next(rounds)
    if lost == "the round":
        with training.gradients({"w": np.zeros(size, np.int64)}).recover():
            pass
        # Without a trace of the recovery, nobody has it.
        training.client.delete("redisacc:{train}:recovered")
    elif lost == "everything":
        training.client.flushall()
    else:
        kept.restore()
    chief.publish(taken.gradient)
    # The chief may throw this gradient away with older ones. The loop applies it again.
    waiting = background(next, rounds)
    other = training.work(worker, lambda *_: {"w": np.full(size, 2)})
    taken = waiting.result()
    assert (taken.global_step, taken.num_accumulated, taken.gradient["w"].tolist()) == (1, 1, [2] * size)
    chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
    assert list(rounds) == []
    other.join()
    assert chief.parameters["w"].tolist() == [3] * size
    assert training.client.hlen("redisacc:{train}:taken") == 0
