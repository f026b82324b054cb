"""What a chief and its workers say while they wait, and how they wait for a server that is away."""

import time

import pytest

import redisacc


@pytest.fixture
def _impatient(durations):
    durations(report=0.1, poll=2.0)
    # A busy machine stands still for a second now and then.
    durations(last_poll=2.0, poll_every=0.1, poll=0.5)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "redisacc"]


@pytest.mark.usefixtures("_impatient")
def test_a_chief_says_who_is_there_and_who_is_gone(training, background, until, caplog):
    chief = training.chief(workers=2)
    one = training.work(training.worker(0), gradient=lambda *_: {"w": [1, 1]})
    training.give_lease("worker 7", "host:7", -5_000)
    waiting = background(training.lead, chief, 1)
    said = until(lambda: [text for text in messages(caplog) if "still waiting: 1 of 2" in text])[0]
    assert "; in the round: worker 0 (1); gone: worker 7 (host:7, last seen" in said
    assert said.endswith("; 1 worker with a lease")
    assert "no chief" not in said
    training.work(training.worker(1))
    waiting.result()
    one.join()


@pytest.mark.usefixtures("_impatient")
def test_a_worker_says_who_is_expected(training, until, caplog, background):
    chief = training.chief(workers=2)
    training.worker(1)
    one = training.work(training.worker(0), gradient=lambda *_: {"w": [1, 1]})
    said = until(lambda: [text for text in messages(caplog) if "expected: " in text])[0]
    assert "still waiting for parameters after step 0" in said
    assert "; in the round: worker 0 (1); expected: worker 1 (" in said
    assert said.endswith("; 2 workers with a lease")
    chief.close()
    until(lambda: [text for text in messages(caplog) if text.endswith("; no chief")])
    with redisacc.Parameters("train", redis=training.client) as parameters:
        parameters.delete()
    with pytest.raises(redisacc.NotFoundError, match="parameters"):
        one.result()


@pytest.mark.usefixtures("_impatient")
def test_a_worker_that_waits_for_the_first_parameters_says_so(training, until, caplog):
    one = training.work()
    said = until(lambda: [text for text in messages(caplog) if "still waiting for parameters" in text])[0]
    assert "nothing has been published, so check the name" in said
    assert "1 worker with a lease; no chief" in said
    training.lead(training.chief(), 1)
    one.join()


@pytest.mark.usefixtures("_impatient")
def test_messages_list_a_few_of_many(training, until, caplog, background):
    chief = training.chief(workers=1)
    for number in range(15):
        training.give_lease(f"worker {number}", f"host:{number}", -1000)
    waiting = background(training.lead, chief, 1)
    said = until(lambda: [text for text in messages(caplog) if "gone: " in text])[0]
    assert said.count(", last seen ") == 10
    assert ", 5 more; " in said
    training.work()
    waiting.result()


# A server that is away


@pytest.fixture
def away(daemon, training):
    """A training on a server of its own, which loses nothing."""
    server = daemon("--appendonly", "yes", "--appendfsync", "always").start()
    training.client = server.client()
    return server


@pytest.mark.thorough
@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("patience", [0, 0.4])
def test_patience_ends(training, away, background, until, patience):
    chief, worker = training.chief(patience=patience), training.worker(patience=patience)
    steps = worker.steps()
    next(steps)
    worker.apply({"w": [1, 1]})
    rounds = chief.rounds()
    taken = next(rounds)
    away.kill()
    began = time.monotonic()
    with pytest.raises(redisacc.ServerUnavailableError):
        chief.publish({"w": taken.gradient["w"]})
    with pytest.raises(redisacc.ServerUnavailableError):
        worker.apply({"w": [1, 1]})
    assert time.monotonic() - began < 20
    away.start()
    # Nothing was lost: both go on.
    chief.publish({"w": taken.gradient["w"]})
    assert next(steps)[0] == 1
    waiting = [background(next, steps), background(next, rounds)]
    until(lambda: training.client.zcard("redisacc:{train}:queue"))
    away.kill()
    for one in waiting:
        with pytest.raises(redisacc.ServerUnavailableError):
            one.result()
    away.start()


@pytest.mark.thorough
@pytest.mark.usefixtures("_impatient")
def test_patience_without_end_says_once_that_the_server_is_away(training, away, background, until, caplog, clock):
    chief, worker = training.chief(), training.worker()
    steps = worker.steps()
    next(steps)
    rounds = chief.rounds()
    # A take waits, and a gradient is to be applied.
    waiting = background(next, rounds)
    until(lambda: training.client.zcard("redisacc:{train}:queue"))
    away.kill()
    applied = background(worker.apply, {"w": [1, 1]})
    until(lambda: len([text for text in messages(caplog) if "trying until" in text]) == 2)
    # They try again and again.
    with clock.running():
        began = clock.now()
        until(lambda: clock.now() - began > 20)
    away.start()
    # The server was away before it was sent.
    assert applied.result().outcome == "applied"
    taken = waiting.result()
    assert taken.gradient["w"].tolist() == [1, 1]
    said = [text for text in messages(caplog) if "still waiting" not in text]
    assert sorted(text.partition("; trying")[0].partition(": no Redis")[0] for text in said) == [
        "train: could not reach the server to apply the gradient of step 0",
        "train: the server is back",
        "tree_accumulator (train): lost the server while a take was waiting",
        "tree_accumulator (train): the server is back",
    ]
    caplog.clear()
    # Parameters are to be published, and somebody waits for them.
    waiting = background(next, steps)
    away.kill()
    published = background(chief.publish, {"w": taken.gradient["w"]})
    until(lambda: [text for text in messages(caplog) if "to publish step 1; trying until it is back" in text])
    away.start()
    published.result()
    assert waiting.result()[0] == 1
    assert chief.step == 1
