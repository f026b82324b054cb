"""The loop of a training: what a chief and its workers do while nothing is broken, and while somebody dies."""

import contextlib
import os

import numpy as np
import pytest
from support.leaks import remaining
from support.servers import contents

import redisacc
from redisacc._protocol.rounds import granted_rounds

# Each of three partitions has a part of so many elements.
SIZE = 20_000


@pytest.mark.parametrize("form", ["dense", "slices", "pair"])
def test_a_single_array(training, form):
    chief = training.chief(np.zeros((4, 2), np.int64), sparse=[] if form == "dense" else ["."])
    rows = np.full((1, 2), 7)
    gradients = {
        "dense": np.full((4, 2), 7),
        "slices": redisacc.IndexedSlices(rows, [3], [4, 2]),
        "pair": ([3], rows),
    }
    seen = []

    def gradient(_number, step, parameters):
        seen.append(parameters.tolist())
        return gradients[form]

    one = training.work(gradient=gradient)
    table = np.zeros((4, 2), np.int64)
    for taken in chief.rounds(until=2):
        if form == "dense":
            table = table + taken.gradient
            chief.publish(table)
        else:
            table = table.copy()
            table[taken.gradient.indices] += taken.gradient.values
            chief.publish(table, changed={".": taken.gradient.indices})
    one.join()
    assert chief.parameters.tolist() == table.tolist()
    assert table.sum() == (2 * 14 if form != "dense" else 2 * 56)
    # The worker saw what the chief began with, and what it published for step 1.
    assert seen == [np.zeros((4, 2)).tolist(), (table / 2).tolist()]


def test_a_finished_training_can_be_continued(training):
    chief = training.chief()
    one = training.work()
    training.lead(chief, 2)
    one.join()
    # The loops of a chief with the same end, and of a worker that starts later, end at once.
    training.lead(chief, 2)
    training.lead(chief, 1)
    chief.close()
    assert one.result() == (0, [0, 1])
    assert training.work().result() == (1, [])
    later = training.chief()
    # This worker may start first: it waits a moment for a chief to continue.
    more = training.work()
    training.lead(later, 4)
    assert more.result()[1] == [2, 3]
    assert later.parameters["w"].tolist() == [4, 6]


def test_a_worker_of_a_run_waits_for_what_its_chief_says_about_a_finished_training(
    training, monkeypatch, durations, until, proxy
):
    with training.chief() as first:
        one = training.work()
        training.lead(first, 2)
        assert one.result()[1] == [0, 1]
    # Neither time nor other chiefs decide.
    durations(continued_within=0.0)
    monkeypatch.setenv("REDISACC_CHIEF_RUN_ID", "the-chief")

    def ask():
        """Waits until the worker has looked whether the training is continued."""
        proxy.listen_anew()
        until(lambda: proxy.sent.count("HMGET") > 5)

    early = training.work(training.worker(redis=proxy.url))
    ask()
    with training.chief() as other:
        training.lead(other, 2)
    ask()
    assert early.running
    monkeypatch.setenv("REDISACC_RUN_ID", "the-chief")
    with training.chief() as own:
        training.lead(own, 2)
    # One that was there before the chief, and one that comes when the chief has gone.
    assert early.result()[1] == training.work().result()[1] == []
    monkeypatch.setenv("REDISACC_CHIEF_RUN_ID", "the-chief-of-the-next-run")
    monkeypatch.setenv("REDISACC_RUN_ID", "the-chief-of-the-next-run")
    late = training.work(training.worker(redis=proxy.url))
    ask()
    with training.chief() as own:
        training.lead(own, 3)
        own.finish()
    assert late.result()[1] == [2]


def test_a_loop_without_an_end_ends_when_it_says_so(training):
    chief = training.chief()
    one = training.work()
    for _ in chief.rounds():
        chief.publish({"w": chief.parameters["w"] + 1})
        if chief.step == 3:
            chief.finish()
            break
    # It may have begun with step 3 before.
    assert one.result()[1] in ([0, 1, 2], [0, 1, 2, 3])
    with redisacc.Parameters("train", redis=training.client) as parameters:
        assert parameters.finished()
        assert parameters.step() == 3
    # What was published is also acknowledged.
    assert training.client.hlen("redisacc:{train}:taken") == 0


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize("parts_per_call", [100, 1])
def test_a_program_publishes_a_step_and_ends_its_round_in_one_request(
    training, proxy, monkeypatch, parts_per_call, partitions
):
    monkeypatch.setattr(granted_rounds, "PARTS_PER_CALL", parts_per_call)
    tree, options = {"w": np.zeros(SIZE, np.int64)}, {"limits": redisacc.Limits(in_place=0, inline=0)}
    chief = training.chief(tree, workers=2, redis=proxy.where, partitions=partitions, **options)
    crew = [training.worker(number) for number in range(2)]
    loops, rounds = [one.steps() for one in crew], chief.rounds(until=2)
    for step in range(2):
        for one, loop in zip(crew, loops, strict=True):
            assert next(loop)[0] == step
            one.apply({"w": np.ones(SIZE, np.int64)})
        taken = next(rounds)
        proxy.listen_anew()
        chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
        assert proxy.sent.count("publish") == 1
        # Only what one script cannot remove takes more.
        assert ("acknowledge" in proxy.sent) == (parts_per_call == 1)
        assert training.client.hlen("redisacc:{train}:taken") == 0
        assert [*training.client.scan_iter("redisacc:{train*}:part:*")] == []
    assert list(rounds) == []
    assert chief.parameters["w"].tolist() == [4] * SIZE


@pytest.mark.parametrize("dies_at", [None, "before", "after"])
def test_a_chief_decides_in_the_loop_that_a_step_is_the_last(training, dies_at):
    """Also if it dies before or after it has published that step, and another one takes its place."""
    one = training.work()
    chief = training.chief()
    for _ in chief.rounds():
        if chief.step == 1 and dies_at == "before":
            break
        chief.publish({"w": chief.parameters["w"] + 1}, finished=chief.step == 1)
        if chief.step == 2 and dies_at == "after":
            break
    if dies_at is not None:
        chief.close()
        chief = training.chief()
        assert chief.step == {"before": 1, "after": 2}[dies_at]
        for _ in chief.rounds():
            chief.publish({"w": chief.parameters["w"] + 1}, finished=True)
    assert (chief.step, chief.parameters["w"].tolist()) == (2, [2, 2])
    assert one.result()[1] == [0, 1]
    assert training.record[b"num_accumulated"] == b"0"
    assert training.client.hlen("redisacc:{train}:taken") == 0


def test_a_round_that_nobody_published_stays(training):
    one = training.work()
    with training.chief() as chief:
        with pytest.raises(
            redisacc.RedisAccError,
            match=r"of step 0 were not published\. Call publish\(\) once in the body of the loop",
        ):
            for _ in chief.rounds():
                pass
        # The same chief gets it again, and so does another one.
        with contextlib.suppress(ZeroDivisionError):
            for taken in chief.rounds():
                assert taken.gradient["w"].tolist() == [1, 0]
                raise ZeroDivisionError
    other = training.chief()
    training.lead(other, 2)
    assert other.parameters["w"].tolist() == [2, 1]
    one.join()


def test_publish_belongs_into_the_body_and_once(training):
    chief = training.chief()
    with pytest.raises(redisacc.InvalidArgumentError, match="needs the round of a loop"):
        chief.publish({"w": np.zeros(2, np.int64)})
    one = training.work()
    for _ in chief.rounds(until=1):
        chief.publish({"w": np.ones(2, np.int64)})
        with pytest.raises(redisacc.InvalidArgumentError, match="publishes once for each"):
            chief.publish({"w": np.ones(2, np.int64)})
    one.join()
    with pytest.raises(redisacc.InvalidArgumentError, match="needs the round of a loop"):
        chief.publish({"w": np.zeros(2, np.int64)})
    assert chief.step == 1


def test_an_invalid_publication_changes_nothing(training):
    chief = training.chief()
    one = training.work()
    for _ in chief.rounds(until=1):
        for wrong in ({"w": np.ones(3, np.int64)}, {"v": np.ones(2, np.int64)}, {"w": np.ones(2)}):
            with pytest.raises(redisacc.InvalidArgumentError, match="of their first version"):
                chief.publish(wrong)
        with pytest.raises(redisacc.InvalidArgumentError, match="changed"):
            chief.publish({"w": np.ones(2, np.int64)}, changed={"x": [0]})
        with pytest.raises(redisacc.InvalidArgumentError, match="finished"):
            chief.publish({"w": np.ones(2, np.int64)}, finished="yes")
        assert (chief.step, chief.parameters["w"].tolist()) == (0, [0, 0])
        chief.publish({"w": np.ones(2, np.int64)})
    one.join()


def test_apply_needs_a_step(training):
    training.chief()
    with pytest.raises(redisacc.InvalidArgumentError, match="needs the step of a loop"):
        training.worker().apply({"w": [1, 1]})


def test_applying_twice_counts_once(training):
    chief = training.chief()
    worker = training.worker()
    for step, _ in worker.steps():
        assert step == 0
        assert worker.apply({"w": [1, 1]}).outcome == "applied"
        assert worker.apply({"w": [5, 5]}).outcome == "repeated"
        with pytest.raises(redisacc.InvalidArgumentError, match="'w'"):
            worker.apply({"w": [1, 1, 1]})
        break
    for taken in chief.rounds():
        assert taken.gradient["w"].tolist() == [1, 1]
        break
    assert worker.apply({"w": [1, 1]}).outcome == "stale"


@pytest.mark.parametrize(
    ("parameters", "options", "message"),
    [
        ({"w": np.zeros(3, np.int64)}, {}, "w"),
        ({"w": np.zeros(2, np.int64), "b": np.zeros(1)}, {}, "b"),
        (np.zeros(2, np.int64), {}, "structure"),
        (None, {"reduction_type": "MEAN"}, "reduction_type"),
    ],
)
def test_another_model_under_the_name_is_refused(training, parameters, options, message):
    training.chief(state={"m": np.zeros(2)}).close()
    before = contents(training.client)
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        training.chief(parameters, **options)
    assert contents(training.client) == before


@pytest.mark.parametrize(
    ("parameters", "options", "message"),
    [
        (None, {"workers": 0}, "workers"),
        (None, {"workers": None}, "REDISACC_WORKERS"),
        (None, {"patience": -1}, "patience"),
        (None, {"sparse": True}, "sparse must be a collection of paths"),
        (np.zeros(2), {"sparse": ["w"]}, r"The paths are \('\.',\)"),
        (None, {"sparse": ["v"]}, "v"),
        ("text", {}, "not <U4"),
        ({}, {}, "leaf|leaves|empty"),
        (None, {"state": {"a": "text"}}, "state"),
        (None, {"reduction_type": "MAX"}, "reduction_type"),
        (None, {"mean": redisacc.Mean(missing="none")}, "missing"),
    ],
)
def test_invalid_arguments_of_a_chief(training, parameters, options, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        training.chief(parameters, **options)
    # Nothing was created, and whoever calls it rightly is not kept waiting.
    assert remaining(training.client) == []


@pytest.mark.parametrize(("options", "message"), [({"number": -1}, "number"), ({"number": 10**6}, "number")])
def test_invalid_arguments_of_a_worker(training, options, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        training.worker(**options)


@pytest.mark.parametrize(
    ("environment", "kind", "message"),
    [
        (
            {"REDISACC_ROLE": "worker"},
            "chief",
            "so it cannot be the chief: start the program with `redisacc run --chief`",
        ),
        ({"REDISACC_ROLE": "chief"}, "worker", "so it cannot be a worker"),
        ({"REDISACC_ROLE": "king"}, "chief", "REDISACC_ROLE must be chief or worker, not 'king'"),
    ],
)
def test_a_wrong_environment(training, monkeypatch, environment, kind, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        getattr(training, kind)()


def test_numbers(training, monkeypatch):
    monkeypatch.setenv("REDISACC_WORKERS", "9")
    assert training.chief(workers=None).workers == 9
    # The lowest that nobody holds.
    workers = [training.worker() for _ in range(3)]
    assert [worker.number for worker in workers] == [0, 1, 2]
    workers[1].close()
    workers[1].close()
    assert "number=1" in repr(workers[1])
    assert training.worker().number == 1
    assert training.worker(7).number == 7
    assert training.worker().number == 3
    monkeypatch.setenv("REDISACC_WORKER_NUMBER", "5")
    assert training.worker().number == 5
    assert training.worker(6).number == 6


def test_a_worker_learns_how_many_workers_there_are(training, background, caplog, durations):
    durations(report=0.3)
    one, spare = training.worker(), training.worker(3)
    waiting = background(lambda: one.workers)
    # By hand, so nobody says how many there are.
    with redisacc.Parameters("train", redis=training.client) as parameters:
        parameters.publish({"w": np.zeros(2, np.int64)}, 0)
    while not caplog.records:
        assert waiting.running
    assert caplog.records[0].getMessage() == (
        "train: still waiting for a chief to say how many workers there are; 2 workers with a lease; no chief"
    )
    caplog.clear()
    first = training.chief(workers=3)
    assert waiting.result() == 3
    assert [spare.workers, spare.workers] == [3, 3]
    (record,) = caplog.records
    assert record.getMessage().startswith("train: this is worker 3, and the data is shared among 3 workers, 0 to 2, ")
    assert "so it has no share of its own. Start the chief with more workers=" in record.getMessage()
    first.close()
    # Another chief needs another number, which a worker learns at its next step.
    second = training.chief(workers=1)
    assert one.workers == 3
    seen = []

    def gradient(_number, step, _parameters):
        seen.append(one.workers)
        return {"w": [1, step]}

    loop = training.work(one, gradient=gradient)
    training.lead(second, 2)
    loop.join()
    assert seen == [1, 1]


@pytest.mark.slow
def test_a_worker_that_waits_for_the_number_of_workers_may_lose_its_own(training):
    worker = training.worker(0)
    training.give_lease("worker 0", "host:9", 60_000)
    with pytest.raises(redisacc.ConflictError, match="host:9"):
        _ = worker.workers


def test_a_training_whose_deletion_has_begun_is_not_taken_for_one_that_is_lost(training, durations):
    """The record of an accumulator stays while its gradients are removed. A worker waited for a chief then, forever."""
    durations(replaced_within=0.1)
    training.chief()
    worker = training.worker(0)
    assert next(worker.steps())[0] == 0
    assert worker.apply({"w": [1, 1]})
    training.client.hset("redisacc:{train}", "incarnation", "deleted:1")
    assert training.client.hexists("redisacc:{train}", "kind")
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        worker.apply({"w": [1, 1]})


def test_a_child_of_a_worker_does_not_give_its_number_back(training):
    worker = training.worker()
    pid = os.fork()
    if pid == 0:
        worker.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert list(training.leases) == ["worker 0"]


def test_a_process_that_ends_gives_its_lease_back(training):
    worker = redisacc.Worker("train", redis=training.client)
    assert list(training.leases) == ["worker 0"]
    del worker
    assert training.leases == {}
