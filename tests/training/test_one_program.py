"""A training whose processes are all the same: one of them leads, and any of them may die, leave or fail."""

import contextlib
import hashlib
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.leaks import leftovers
from support.local_updates import LocalTraining, differences, gradient_of
from support.servers import Snapshot
from support.training_options import grouped
from support.warm_python import WarmPython

import redisacc
from redisacc.optim import SGD, AdamW

PROGRAM = Path(__file__).with_name("one_program.py")
pytestmark = pytest.mark.servers("valkey")

CREW = 3
OPTIMIZER = AdamW(0.01, clip_norm=10.0)


@pytest.fixture
def parameters():
    return {"w": np.ones(1000, np.float32)}


@pytest.fixture
def join(real_client, parameters):
    """Opens a process's side of a training; all are closed when the test ends."""
    opened = []

    def open_it(**options):
        how = {} if "update" in options else {"optimizer": OPTIMIZER}
        given = {"workers": CREW, "redis": real_client, **how, **options}
        opened.append(redisacc.Training("train", parameters, **grouped(given)))
        return opened[-1]

    yield open_it
    for one in opened:
        one.close()


def train(one, until, seen=None, gradient=gradient_of):
    """Runs the loop of a process. Returns the steps that it saw."""
    steps = []
    for step, found in one.steps(until=until):
        steps.append(step)
        if seen is not None:
            seen(one, step)
        one.apply(gradient(one.number, step, found))
    return steps


def add(taken, parameters, _):
    return {"w": parameters["w"] + taken.gradient["w"]}, None


def local(parameters, until, crew=CREW):
    one = LocalTraining(OPTIMIZER, parameters, weights=(1.0,) * crew)
    return one.train(until)


def test_all_work_and_one_leads(join, background, parameters, real_client):
    every = [join() for _ in range(CREW)]
    leaders = set()

    def note(one, step):
        if one.leads:
            leaders.add(one.number)

    running = [background(train, one, 6, note) for one in every]
    assert [one.result(60) for one in running] == [list(range(6))] * CREW
    assert sorted(one.number for one in every) == [0, 1, 2]
    # The first one to lead leads to the end.
    assert len(leaders) == 1
    assert not any(one.leads for one in every)
    step, found = every[1].latest()
    assert step == 6
    state = every[2].latest_state()[1]
    assert differences(local(parameters, 6), found, {slot: state[slot] for slot in OPTIMIZER.slots}) == []
    every[0].delete()
    assert leftovers(real_client) == []
    with pytest.raises(redisacc.NotFoundError, match="parameters"):
        every[1].latest()


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_leads_changes_no_bit(real_server, parameters):
    """Another one leads, and one that is started again works in its place."""

    with contextlib.ExitStack() as started:

        def start():
            one = WarmPython([PROGRAM, real_server.url, "60", str(CREW)], stderr=sys.stderr, text=True)
            started.callback(one.kill)
            return one

        every = [start() for _ in range(CREW)]
        leads = [next(line for line in one.stdout if " 10" in line) for one in every].index("leads 10\n")
        every[leads].kill()
        every[leads].communicate(timeout=20)
        every[leads] = start()
        ends = [one.communicate(timeout=60)[0].splitlines()[-1] for one in every]
        assert [one.returncode for one in every] == [0] * CREW
    digest = hashlib.sha256(local(parameters, 60).parameters["w"].tobytes()).hexdigest()
    assert ends == [f"ends 60 {digest}"] * CREW


def test_the_one_that_leads_restores_what_the_server_has_lost(join, background, parameters, real_client, durations):
    """Another one that took the lease first would have to do without the state of the optimizer."""
    durations(standby_asks_every=0.005, standby_looks_every=0.005)
    every = [join() for _ in range(CREW)]
    leaders = set()

    def seen(one, step):
        if one.leads:
            leaders.add(one.number)
        if step == 3 and one.number == 0:
            durations(young=20.0)
            real_client.flushall()

    running = [background(train, one, 6, seen) for one in every]
    for one in running:
        one.result(60)
    assert len(leaders) == 1
    assert local(parameters, 6).parameters["w"].tobytes() == every[0].latest()[1]["w"].tobytes()


def test_one_that_leaves_hands_over(join, background, parameters, until):
    first, *others = [join() for _ in range(CREW)]
    steps = first.steps(until=6)
    begun = background(next, steps)
    until(lambda: first.leads)
    running = [background(train, one, 6) for one in others]
    assert begun.result(60)[0] == 0
    steps.close()
    first.close()
    until(lambda: any(one.leads for one in others))
    # It has the number that has become free.
    running.append(background(train, join(), 6))
    for one in running:
        one.result(60)
    step, found = others[0].latest()
    assert step == 6
    assert local(parameters, 6).parameters["w"].tobytes() == found["w"].tobytes()


@pytest.mark.parametrize(
    ("update", "error", "message"),
    [
        (lambda *_: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda taken, parameters, state: parameters, redisacc.InvalidArgumentError, "a tuple of two, not dict"),
        (lambda *_: ({"v": np.zeros(3)}, None), redisacc.InvalidArgumentError, "of their first version.*w"),
    ],
    ids=["fails", "returns one", "another tree"],
)
def test_an_update_that_fails_ends_the_process_that_leads(join, update, error, message):
    one = join(update=update, workers=1)
    with pytest.raises(error, match=message):
        train(one, 3)


def test_a_wrong_gradient_ends_the_process_at_once(join):
    one = join(workers=1)
    with pytest.raises(redisacc.InvalidArgumentError, match="grad lacks 'w'"):
        train(one, 3, gradient=lambda *_: {"v": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": None}, redisacc.InvalidArgumentError, "either an optimizer or an update"),
        ({"update": print, "optimizer": OPTIMIZER}, redisacc.InvalidArgumentError, "either an optimizer or an update"),
        ({"update": 3}, redisacc.InvalidArgumentError, "update must be a function, not int"),
        (
            {"workers": 1, "quorum": 2},
            redisacc.InvalidArgumentError,
            r"least must be in \[1, 1\], the number of workers",
        ),
        ({"workers": None}, redisacc.InvalidArgumentError, 'REDISACC_WORKERS.*, or "all" for as many as there are'),
        ({"chekpoint": "x"}, TypeError, "'chekpoint'"),
        ({"standby": True}, TypeError, "'standby'"),
    ],
)
def test_arguments_that_cannot_be_right(join, real_client, options, error, message):
    before = real_client.keys()
    with pytest.raises(error, match=message):
        join(**options)
    assert real_client.keys() == before


def test_options_of_the_chief_are_checked_by_the_one_that_leads(join):
    with pytest.raises(redisacc.InvalidArgumentError, match="missing"):
        train(join(workers=1, mean=redisacc.Mean(missing=3)), 3)


def test_workers_are_known_before_the_training_begins(join, monkeypatch):
    assert join(workers=2).workers == 2
    assert join(workers=5, quorum=4).workers == 5
    monkeypatch.setenv("REDISACC_WORKERS", "5")
    assert join(workers=None).workers == 5


@pytest.mark.parametrize(("number", "warns"), [(1, True), (2, False)])
def test_more_workers_than_there_are(join, background, monkeypatch, caplog, number, warns):
    monkeypatch.setenv("REDISACC_WORKERS", str(number))
    every = [join(workers=2) for _ in range(2)]
    for one in [background(train, one, 1) for one in every]:
        one.result(60)
    said = "2 workers are expected, and REDISACC_WORKERS says that there are only 1. Leave workers= out"
    assert caplog.text.count(said) == warns


def test_all_workers_are_counted_in_the_loop_only(join):
    """Before, the process would wait for one that leads, and it may be this one."""
    one = join(workers="all")
    with pytest.raises(redisacc.InvalidArgumentError, match=r"in the loop over steps\(\)"):
        _ = one.workers
    counts = []
    train(one, 2, lambda one, step: counts.append(one.workers))
    assert counts == [1, 1]
    assert one.workers == 1


def test_any_process_ends_the_training_for_all(join, background):
    every = [join(workers=2) for _ in range(2)]
    # Whoever has not read a step before the end does not get it.
    both_have_step_3 = threading.Barrier(2, timeout=20)

    def seen(one, step):
        if step == 3:
            both_have_step_3.wait()
            if not one.leads:
                one.finish()

    running = [background(train, one, None, seen) for one in every]
    assert [max(one.result(60)) for one in running] == [3, 3]
    # The round of step 3 may be complete by then.
    assert every[0].latest()[0] in (3, 4)


def test_a_finished_training_is_continued_up_to_a_later_step(join, parameters, caplog):
    for until, expected in ((3, [0, 1, 2]), (3, []), (5, [3, 4])):
        caplog.clear()
        with join(workers=1) as one:
            assert train(one, until) == expected
            said = "train: step 3 had been reached before, so nothing was left to do. Continue with a larger until"
            assert (said in caplog.text) is (expected == [])
            step, found = one.latest()
        assert step == until
        assert local(parameters, until, crew=1).parameters["w"].tobytes() == found["w"].tobytes()


def test_one_process_says_what_all_wait_for(join, background, training, until, durations, caplog):
    """On each machine, the one that leads; if it runs elsewhere, the first of those that wait."""
    durations(report=0.1, report_pause=0.1)
    every = [join() for _ in range(CREW)]
    applies = threading.Event()

    def late(one, step):
        assert applies.wait(60)

    def said(what):
        return [record for record in caplog.records if what in record.getMessage()]

    running = [background(train, one, 2) for one in every[:2]]
    running.append(background(train, every[2], 2, late))
    until(lambda: len(said("a take of 3 is still waiting: 2 of 3 gradients")) > 5)
    assert said("still waiting for parameters after step 0") == []
    training.give_lease("chief", "elsewhere:1", 60_000)
    until(lambda: len(said("still waiting for parameters after step 0")) > 5)
    threads = {record.thread for record in said("still waiting for parameters after step 0")}
    assert len(threads) == 1
    training.give_lease("chief", "elsewhere:1", 0)
    applies.set()
    for one in running:
        one.result(60)


def test_a_process_that_is_started_as_the_chief_only_leads(join, background, monkeypatch, parameters):
    monkeypatch.setenv("REDISACC_ROLE", "chief")
    leader = join(workers=1)
    monkeypatch.setenv("REDISACC_ROLE", "worker")
    worker = join(workers=1)
    monkeypatch.delenv("REDISACC_ROLE")
    assert leader.number is None
    led = background(lambda: list(leader.steps(until=3)))
    assert train(worker, 3) == [0, 1, 2]
    assert led.result(60) == []
    assert leader.latest()[0] == 3


def test_one_that_stood_still_stands_by_again(join, training, until, parameters, clock, caplog):
    """Another process has its lease meanwhile, and gives it back."""
    one = join(workers=1)

    def seen(one, step):
        if step == 2:
            training.give_lease("chief", "host:1", 9_500)
            # It may lead again before anybody has seen that it does not.
            until(lambda: "; standing by" in caplog.text)

    with clock.running():
        assert train(one, 5, seen) == [0, 1, 2, 3, 4]
    assert local(parameters, 5, crew=1).parameters["w"].tobytes() == one.latest()[1]["w"].tobytes()


@pytest.mark.loses_data
@pytest.mark.usefixtures("time_runs")
def test_what_its_worker_has_is_published_in_as_many_partitions(join, training, background, parameters, until, caplog):
    """It has stood by since before there were any. Other processes, which give the same number, are refused else."""
    caplog.set_level("INFO")
    training.give_lease("chief", "host:1", 10**9)
    one = join(workers=1, partitions=3, update=add)

    def seen(_, step):
        if step == 1:
            training.client.flushall()

    running = background(train, one, 3, seen)
    until(lambda: "standing by to follow it" in caplog.text)
    with redisacc.Parameters("train", redis=training.client, partitions=3) as published:
        published.publish(parameters, 1)
    assert running.result(60) == [1, 2]
    assert "with the parameters of a living worker" in caplog.text
    assert training.client.hget("redisacc:{train}:parameters", "partitions") == b"0,1,2"


@pytest.mark.loses_data
@pytest.mark.usefixtures("time_runs")
def test_the_process_that_leads_goes_back_to_no_older_data(proxy, join, real_client, until, monkeypatch):
    """Its leader restores what is newer. With fused=False, its weights are the only ones of that step."""
    one = join(workers=1, redis=proxy.url, update=add)
    looks, kept, look = [], [], redisacc.Parameters.step
    monkeypatch.setattr(redisacc.Parameters, "step", lambda handle: looks.append(look(handle)) or looks[-1])

    def seen(_, step):
        if step == 1 and not kept:
            kept.append(Snapshot(real_client))
        if step == 3 and len(kept) == 1:
            kept.append(kept[0].restore())
            looks.clear()
            # When its worker has looked at the older data.
            proxy.before("publish", lambda: until(lambda: len(looks) > 3))

    assert train(one, 5, seen) == [0, 1, 2, 3, 4]
    assert 1 in looks


@pytest.mark.loses_data
def test_what_is_published_is_read_from_the_run_with_which_the_loop_has_continued(join, training, parameters):
    """In place of a run that was begun after a loss, the server has its older data again."""
    with redisacc.Parameters("train", redis=training.client) as handle:
        handle.publish(parameters, 0)
        one = join(workers=1)
        assert one.latest()[0] == 0
        training.client.flushall()
    with redisacc.Parameters("train", redis=training.client) as handle:
        handle.publish(parameters, 7)
    assert train(one, 9) == [7, 8]
    assert (one.latest()[0], one.latest_state()[0], one.finished) == (9, 9, True)


def test_a_publication_that_comes_later_than_those_of_a_successor(training, proxy):
    """It left before the network was away for longer than the lease, so nothing had said that the lease is lost."""
    first = training.chief(redis=proxy.url)
    one = training.work()
    rounds = first.rounds()
    taken = next(rounds)
    successors = []

    def succeed():
        training.give_lease("chief", "gone:1", -1)
        successors.append(training.chief())
        training.lead(successors[0], 3)

    proxy.before("publish", succeed)
    with pytest.raises(redisacc.ConflictError, match="have step 3 already, so step 1 cannot be published"):
        first.publish({"w": first.parameters["w"] + taken.gradient["w"]})
    rounds.close()
    assert one.result(60) == (0, [0, 1, 2])
    assert successors[0].parameters["w"].tolist() == [3, 3]


class Mirrored:
    """An ``update`` that raises an error of a class that a leader itself handles."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1
        raise redisacc.ConflictError("the mirror is ahead")


@pytest.mark.parametrize("function", ["update", "log"])
def test_an_error_of_the_program_ends_it_whatever_its_class(join, function):
    fails = Mirrored()
    options = {"update": fails} if function == "update" else {"log": fails, "optimizer": redisacc.optim.SGD(0.5)}
    with pytest.raises(redisacc.ConflictError, match="the mirror is ahead"):
        train(join(workers=1, **options), 3)
    assert fails.calls == 1


def test_another_model_under_this_name_is_refused_in_every_process(real_client):
    """Also in one that does not lead, whether it opens the training before the first version or after."""

    def opened(model, number):
        optimizer = redisacc.optim.SGD(0.5)
        return redisacc.Training("train", model, optimizer=optimizer, workers=1, number=number, redis=real_client)

    early = opened({"w": np.zeros((2, 3), np.float32)}, 1)
    with early, opened({"w": np.zeros(2, np.float32)}, 0) as training:
        steps = training.steps(until=2)
        next(steps)
        with pytest.raises(redisacc.InvalidArgumentError, match=r"'w'.*float32 \[2\].*float32 \[2,3\]"):
            next(early.steps(until=2))
        for model, message in (
            ({"w": np.zeros(3, np.float32)}, r"'w'.*float32 \[2\].*float32 \[3\]"),
            ({"v": np.zeros(2, np.float32)}, "tree lacks 'w'"),
            ({"w": np.zeros(2)}, r"'w'.*float32 \[2\].*float64 \[2\]"),
            ({"w": np.ma.masked_array([1.0], [True])}, "'w' must not be a masked array"),
        ):
            with pytest.raises(redisacc.InvalidArgumentError, match=message):
                opened(model, 2)
        # Nobody waits for those that were refused.
        training.apply({"w": np.ones(2, np.float32)})
        for _ in steps:
            training.apply({"w": np.ones(2, np.float32)})


def test_a_step_sends_nothing_that_its_process_knows(real_client):
    """Of five parts, only those of the gradient are fetched, and no message tells of each of them."""

    def sent():
        stats = real_client.info("commandstats")
        return np.array([stats[f"cmdstat_{name}"]["calls"] for name in ("get", "publish")])

    weights, seen = {"w": np.zeros(300_000, np.float32)}, {}
    with redisacc.Training("lean", weights, workers=1, optimizer=SGD(0.1), redis=real_client) as training:
        for step, found in training.steps(until=13):
            seen[step] = sent()
            training.apply(found)
        gets, messages = seen[12] - seen[2]
        assert gets <= 10 * (5 + 1)
        # The upload, the gradient twice, the take twice and the version twice; and one more.
        assert messages <= 10 * 8
        training.delete()
