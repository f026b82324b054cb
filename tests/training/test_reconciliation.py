"""Whatever is lost or away at whatever moment, a training looks at what there is, and does the first thing missing."""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import redis
from support.proxy import Fault
from support.selection import thorough
from support.servers import Snapshot
from support.training_options import grouped

import redisacc
from redisacc.optim import SGD

pytestmark = pytest.mark.servers("valkey")


@pytest.fixture(autouse=True)
def _brief(durations):
    durations(poll=0.2, poll_every=0.1, gathering=0.5)


@pytest.fixture
def join(real_client, proxy):
    """Opens a process's side of a training, over the proxy; all are closed when the test ends."""
    opened = []

    def open_it(parameters, **options):
        given = {"workers": 1, "redis": proxy.url, **options}
        opened.append(redisacc.Training("train", parameters, **grouped(given)))
        return opened[-1]

    yield open_it
    for one in opened:
        one.close()


BEGIN = {"w": np.zeros(4, np.float32), "table": np.zeros((9, 2), np.float32)}


def add(taken, parameters, state):
    change = taken.gradient["table"]
    table = parameters["table"].copy()
    table[change.indices] += change.values
    return {"w": parameters["w"] + taken.gradient["w"], "table": table}, {"n": state["n"] + 1}


# The state of an optimizer is restored, too, and so is a program's.
UPDATE = {"sparse": ["table"], "update": add, "state": {"n": np.array(0)}}
OPTIMIZER = {"sparse": ["table"], "optimizer": SGD(lambda step: 0.5 / (1 + step % 3), momentum=0.5)}
HOW = {"update": UPDATE, "optimizer": OPTIMIZER}
EVERY_HOW = {
    **HOW,
    "streams": {**OPTIMIZER, "limits": redisacc.Limits(in_place=0)},
    "update-partitions": {**UPDATE, "partitions": 3},
    "optimizer-partitions": {**OPTIMIZER, "partitions": 3},
    # A worker that goes back keeps the state of its inner optimizer, so this one has none.
    "local": {"optimizer": redisacc.LocalSteps(SGD(0.5), 2, SGD(0.7, momentum=0.5))},
}

both = pytest.mark.parametrize("how", HOW)


def train(one, until, seen=lambda step: None, how=""):
    """Trains, and returns the bytes of the weights, and the state in the end."""
    for step, found in one.steps(until=until):
        seen(step)
        gradient = {"w": np.sin(found["w"]) + np.float32(step), "table": np.ones((1, 2), np.float32)}
        if how == "local":
            gradient["table"] = np.sin(found["table"])
        else:
            gradient["table"] = redisacc.IndexedSlices(gradient["table"], np.array([step % 9]))
        if how != "streams":
            one.apply(gradient)
            continue
        with one.begin() as upload:
            for path, leaf in gradient.items():
                upload.put(path, leaf)
            upload.commit()
    (step, weights), (_, state) = one.latest(), one.latest_state()
    assert step == until
    # Of arrays as small as these, repr shows each bit.
    return weights["w"].tobytes(), weights["table"].tobytes(), repr(state)


@pytest.fixture
def expected(real_client):
    """Returns what an undisturbed training would have in the end."""

    def undisturbed(how, until):
        options = grouped({"workers": 1, "redis": real_client, **EVERY_HOW[how]})
        with redisacc.Training("undisturbed", BEGIN, **options) as one:
            found = train(one, until, how=how)
            one.delete()
        return found

    return undisturbed


# What the server loses, as a pattern of keys, and how often again while it is restored.
LOSSES = {
    "everything": (b"", 1),
    "everything-3": (b"", 3),
    "older": (b"", 1),
    "parameters": (b":parameters|:blob:", 1),
    "parts": (b":part:|:blob:", 1),
    "gradients": (rb"^redisacc:{train}(?!:parameters)", 1),
}


@pytest.mark.slow(keep="everything-3-update$|older-optimizer$|parts-streams")
@pytest.mark.parametrize("how", EVERY_HOW)
@pytest.mark.parametrize("what", LOSSES)
def test_the_only_process_loses_it_again_and_again(
    join, losses, background, expected, everything, durations, how, what
):
    """The defect: the last copy of the weights ended with the process."""
    begin = dict(enumerate(range(0, 50, 1 if everything else 10), 2))
    # The last one happens while the training still has some steps to make.
    number, until = len(begin), len(begin) // 2 * 2 + 6
    wanted = expected(how, until)
    one = join(BEGIN, **EVERY_HOW[how])
    pattern, times = LOSSES[what]
    if pattern:
        losses.only(pattern)

    def seen(step):
        # From here on, the server may have lost something.
        durations(young=20.0)
        if step in begin:
            losses.begin(begin.pop(step), times)
        if what == "older":
            losses.keep()

    running = background(train, one, until, seen, how)
    if what == "gradients":
        # Both are in one slot, so a server loses both: somebody has deleted them.
        with pytest.raises(redisacc.NotFoundError, match="it was deleted"):
            running.result(60)
    else:
        assert running.result(300) == wanted
        assert not begin
        assert losses.number > (1 + times) * number / 2
    one.delete()


# Each place takes some seconds, because a chief waits until all workers have claimed what they have.
@pytest.mark.slow
@pytest.mark.loses_data
@pytest.mark.parametrize("after", thorough(range(0, 60, 2), usual=[6, 14, 22, 30]))
def test_what_a_worker_hands_over_is_lost_again(training, losses, proxy, until, after):
    """A chief that begins asks a worker for what the server has lost, and loses that while it continues with it."""
    seen = []
    one = training.work(gradient=lambda _, step, parameters: seen.append(step) or {"w": [1, 1]})
    chief = training.chief()
    rounds = chief.rounds()
    taken = next(rounds)
    chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
    rounds.close()
    until(lambda: 1 in seen)
    chief.close()
    losses.begin(after)
    chief = training.chief({"w": np.full(2, 50)}, redis=proxy.url)
    assert (chief.step, chief.parameters["w"].tolist()) == (1, [1, 1])
    training.lead(chief, 3)
    assert chief.parameters["w"].tolist() == [3, 3]
    assert one.result(60)[1][-1] == 2


@pytest.mark.loses_data
@pytest.mark.usefixtures("time_runs")
def test_everything_is_lost_together_with_a_reducer(join, reducing, real_client, background, caplog):
    """The worker in the process that leads has the weights; only the optimizer's state is lost."""
    parameters = {"w": np.zeros(350_000, np.float32)}
    one = join(parameters, optimizer=SGD(0.5, momentum=0.5))
    reducers = []

    def run():
        for step, found in one.steps(until=8):
            if step == 1:
                reducers.extend(reducing(wanted=1))
            if step == 5:
                for reducer in reducers:
                    reducer.close()
                real_client.flushall()
            one.apply({"w": np.ones_like(found["w"])})
        return one.latest()[0]

    assert background(run).result(120) == 8
    assert int(one.latest_state()[1]["updates"]) < 8
    assert "with the parameters of a living worker" in caplog.text
    one.delete()


@both
@pytest.mark.usefixtures("time_runs")
def test_older_data_of_processes_before_those_that_continued_with_a_checkpoint(
    join, real_client, expected, how, tmp_path
):
    wanted, kept = expected(how, 8), {}
    options = {"checkpoint": redisacc.Checkpoints(tmp_path, every=1), **HOW[how]}

    def seen(step):
        if step == 2:
            kept[2] = Snapshot(real_client, lasting=True)
        elif step == 6:
            kept[2].restore()

    with join(BEGIN, **options) as one:
        train(one, 4, seen)
    real_client.flushall()
    again = join(BEGIN, **options)
    assert train(again, 8, seen) == wanted
    again.delete()


@both
@pytest.mark.usefixtures("time_runs")
def test_later_data_of_processes_before_those_that_began_again(join, real_client, expected, how):
    """Their leader stands by, and continues with what is later."""
    wanted, kept = expected(how, 8), []

    def seen(step):
        if step == 3 and not kept:
            kept.append(Snapshot(real_client, lasting=True))
        elif step == 1 and kept:
            kept[0].restore()

    with join(BEGIN, **HOW[how]) as one:
        train(one, 4, seen)
    real_client.flushall()
    again = join(BEGIN, **HOW[how])
    assert train(again, 8, seen) == wanted
    again.delete()


@pytest.mark.loses_data
@pytest.mark.usefixtures("time_runs")
def test_a_process_that_joins_after_a_loss_leaves_the_lease_to_the_one_that_has_the_state(
    join, proxy, real_client, background, expected, until, monkeypatch, caplog
):
    caplog.set_level("INFO")
    wanted = expected("optimizer", 6)
    one = join(BEGIN, **HOW["optimizer"])

    def lead():
        with redisacc.Training(
            "train", BEGIN, **grouped({"workers": 1, "redis": real_client, **HOW["optimizer"]})
        ) as joining:
            return list(joining.steps(until=6))

    leading = []

    def seen(step):
        if step == 3:
            proxy.stall()
            real_client.flushall()
            caplog.clear()
            monkeypatch.setenv("REDISACC_ROLE", "chief")
            leading.append(background(lead))
            until(lambda: "whether a worker still has a run of this name" in caplog.text)
            proxy.resume()

    assert background(train, one, 6, seen).result(60) == wanted
    assert leading[0].result(60) == []
    one.delete()


@pytest.mark.loses_data
@pytest.mark.usefixtures("time_runs")
def test_nobody_waits_for_a_process_whose_loop_has_ended(join, real_client, background, durations, until, caplog):
    """It has a later step, and would never publish it."""
    given, begins = {"workers": 2, "quorum": 1, **HOW["update"]}, threading.Event()
    ended, one = join(BEGIN, **given), join(BEGIN, **given)

    def end():
        for _ in ended.steps(until=3):
            begins.wait(20)
            ended.skip()

    ending = background(end)
    until(lambda: ended.leads)

    def seen(step):
        if not begins.is_set():
            begins.set()
            ending.result(20)
            durations(young=20.0)
            real_client.flushall()

    background(train, one, 3, seen).result(60)
    assert "worker 0, which has" not in caplog.text
    one.delete()


@pytest.mark.loses_data
def test_a_program_is_interrupted_while_its_worker_waits(training, real_client, monkeypatch):
    """It may live on, as in a notebook, so a leader must not wait for what it has."""
    chief, worker = training.chief(), training.worker()
    steps, claims = worker.steps(), []
    next(steps)
    worker.apply({"w": [1, 1]})
    chief.close()
    real_client.flushall()

    def interrupt(seconds):
        claims.extend(real_client.hkeys("redisacc:{train}:parameters:claims"))
        raise KeyboardInterrupt

    monkeypatch.setattr(worker._transport.waits, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    worker._claimant.claim_quietly()
    assert claims == [b"worker 0"]
    assert not real_client.exists("redisacc:{train}:parameters:claims")


@pytest.mark.slow
def test_an_outage_outlasts_the_patience_of_opening(join, proxy, background, durations, monkeypatch, until, caplog):
    """A process that is started again in its place does without a server for as long as its patience says."""
    monkeypatch.setenv("REDISACC_RESTARTED", "1")
    durations(opening=0.2)
    proxy.refuses = True

    running = background(lambda: train(join(BEGIN, **HOW["update"]), 3))
    until(lambda: "could not reach the server to open the run" in caplog.text)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 1 or not running.running)
    proxy.refuses = False
    running.result(30)


@pytest.fixture
def refusing(daemon):
    """A server of its own, which can be made to refuse writes, and to accept them again."""
    server = daemon("--enable-protected-configs", "yes", "--save", "3600 1000").start()

    def refuse(cause):
        with server.client() as client:
            if cause in ("READONLY", "MASTERDOWN"):
                # It becomes a replica of nobody.
                client.config_set("replica-serve-stale-data", "yes" if cause == "READONLY" else "no")
                client.replicaof("127.0.0.1", 1)
                return
            if cause == "BUSY":
                client.config_set("lua-time-limit", 1)
                # Nobody waits for its reply, and so nobody sends it again.
                busy = client.connection_pool.make_connection()
                busy.send_command("EVAL", "while true do end", 0)
                busy.disconnect()
                return
            if cause != "MISCONF":
                client.config_set(*{"NOREPLICAS": ("min-replicas-to-write", 1), "OOM": ("maxmemory", 1)}[cause])
                return
            # It cannot save its data.
            gone = server.folder / "gone"
            gone.mkdir()
            client.config_set("save", "3600 1000")
            client.config_set("dir", str(gone))
            gone.rmdir()
            client.bgsave()
            while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
                time.sleep(0.01)

    def accept():
        with server.client() as client:
            with suppress(redis.ResponseError):
                client.script_kill()
            client.replicaof("NO", "ONE")
            client.config_set("min-replicas-to-write", 0)
            client.config_set("maxmemory", 0)
            client.config_set("dir", str(server.folder))
            client.config_set("stop-writes-on-bgsave-error", "no")

    return server, refuse, accept


@pytest.mark.slow(keep="MISCONF-update|OOM-optimizer")
@both
@pytest.mark.parametrize("cause", ["NOREPLICAS", "MISCONF", "OOM", "READONLY", "MASTERDOWN", "BUSY"])
def test_writes_that_are_refused_for_a_while(join, refusing, background, expected, caplog, until, how, cause):
    server, refuse, accept = refusing
    wanted = expected(how, 6)
    one = join(BEGIN, redis=server.url, **HOW[how])

    def end():
        until(lambda: "; trying" in caplog.text and cause in caplog.text)
        accept()

    def seen(step):
        if step == 2:
            refuse(cause)
            background(end)

    assert background(train, one, 6, seen).result(60) == wanted
    one.delete()


@pytest.mark.loses_data
@pytest.mark.usefixtures("time_runs")
def test_a_server_refuses_what_a_worker_hands_over(training, proxy, real_client, background, until, caplog):
    """That passes, and nobody else has it."""
    begun = []
    training.work(training.worker(redis=proxy.url), lambda _, step, __: begun.append(step) or {"w": [1, 1]})
    chief = training.chief()
    rounds = chief.rounds()
    next(rounds)
    chief.publish({"w": np.full(2, 1)})
    until(lambda: 1 in begun)
    rounds.close()
    chief.close()
    real_client.flushall()
    # Before the elements of the parameters. The clock of the test goes on, because shortening lives needs no memory.
    proxy.before("SET", lambda: real_client.config_set("maxmemory", 1))
    leading = background(training.chief)
    try:
        until(lambda: "the server refuses writes; trying to look for the run" in caplog.text)
    finally:
        real_client.config_set("maxmemory", 0)
    assert leading.result(60).step == 1


@pytest.mark.slow(keep="request-optimizer|reply-update")
@both
@pytest.mark.parametrize("direction", ["request", "reply"])
def test_the_server_is_away_at_each_exchange_of_a_step(join, outages, background, expected, everything, how, direction):
    odd = how == "update"
    after = dict(enumerate(range(12) if everything else range(odd, 12, 2), 2))
    until = len(after) + 3
    wanted = expected(how, until)
    one = join(BEGIN, **HOW[how])

    def seen(step):
        if step in after:
            outages.begin_after(after.pop(step), direction)

    assert background(train, one, until, seen).result(120) == wanted
    assert not after
    one.delete()


def test_the_server_is_away_and_goes_back_while_an_update_is_published(
    training, losses, proxy, background, until, caplog
):
    """To before the round: a leader asked again and again for the one that it had."""
    one = training.work(gradient=lambda _, step, __: {"w": [1.0, step]})
    chief = training.chief({"w": np.zeros(2)}, optimizer=SGD(1.0), redis=proxy.url)
    updates = chief.updates(until=6)
    next(updates)
    losses.keep()
    assert next(updates) == 2

    def begin():
        proxy.refuses = True
        losses.lose()
        proxy.cut_all()

    proxy.before("publish", begin)
    publishing = background(list, updates)
    until(lambda: "could not reach the server to publish step 3" in caplog.text)
    proxy.refuses = False
    assert publishing.result(30) == [3, 4, 5, 6]
    assert chief.latest()[1]["w"].tolist() == [-6, -15]
    one.join()


@pytest.mark.loses_data
@pytest.mark.usefixtures("time_runs")
def test_a_leader_that_stood_still_does_not_bring_older_weights_back(training, real_client, until, clock, background):
    """Another process has led since. The server loses what that one has published, and the worker still has it."""
    first = training.chief()
    begun = []
    worker = training.worker()
    training.work(worker, lambda _, step, __: begun.append(step) or {"w": [1, 1]})
    rounds = first.rounds()
    next(rounds)
    first.publish({"w": np.full(2, 1)})
    until(lambda: 1 in begun)
    # As if the process stood still: its lease is not extended.
    first._lease._over.set()
    began = clock.now()
    until(lambda: clock.now() - began > 12)
    second = training.chief()
    second_rounds = second.rounds()
    for step in (1, 2):
        next(second_rounds)
        second.publish({"w": np.full(2, step + 1)})
    until(lambda: 3 in begun)
    second_rounds.close()
    second.close()
    real_client.flushall()
    first._lease._over.clear()
    with pytest.raises(redisacc.ConflictError, match=r"has published step 3, while .* was at step 1"):
        background(next, rounds).result(60)
    first.close()
    third = training.chief()
    assert (third.step, third.parameters["w"].tolist()) == (3, [3, 3])


@pytest.mark.usefixtures("time_runs")
def test_a_predecessor_publishes_just_before_its_round_is_looked_for(
    training, proxy, real_client, until, clock, background
):
    """The next leader has seen that a step has begun, and finds no round of it: nothing is lost."""
    first, is_there, passes = training.chief(redis=proxy.url), threading.Event(), threading.Lock()
    training.work()
    rounds = first.rounds()
    next(rounds)

    def hold():
        is_there.set()
        with passes:
            pass

    passes.acquire()
    # It is sent again while the clock runs.
    proxy.before("publish", hold, times=20)
    publishing = background(first.publish, {"w": np.full(2, 1)})
    until(is_there.is_set)
    # As if the process stood still: its lease is not extended.
    first._lease._over.set()
    began = clock.now()
    until(lambda: clock.now() - began > 12)

    def publish():
        passes.release()
        until(lambda: real_client.hget("redisacc:{train}:parameters", "step") == b"1")

    proxy.before("HSCAN", publish)
    with pytest.raises(redisacc.ConflictError, match="has published step 1"):
        training.chief(redis=proxy.url)
    publishing.result(30)


def test_what_is_lost_comes_back_at_each_exchange(training, real_client, proxy, durations):
    """As if somebody else had published it: the reads of one look see different things."""
    one, after = training.work(), dict(enumerate(range(12), 1))
    chief, until = training.chief(redis=proxy.url), len(after) + 2
    durations(young=20.0)
    for taken in chief.rounds(until=until):
        chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
        if chief.step in after:
            kept = Snapshot(real_client)
            proxy.when_it_happens = lambda kept=kept: kept.restore(alone=False)
            proxy.arm(Fault("request", after[chief.step], 0, "pass"))
            real_client.flushall()
    assert chief.parameters["w"].tolist() == [until, sum(range(until))]
    assert one.result(60)[1] == list(range(until))


def test_older_data_are_lost_at_each_exchange(training, real_client, proxy, durations):
    """They have an accumulator that this chief does not know, so it is not as if somebody had deleted that alone."""
    one, after = training.work(), dict(enumerate(range(12), 2))
    chief, until, kept = training.chief(redis=proxy.url), len(after) + 3, None
    durations(young=20.0)
    for taken in chief.rounds(until=until):
        chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
        if kept is None:
            kept = Snapshot(real_client, lasting=True)
            real_client.flushall()
        elif chief.step in after:
            proxy.when_it_happens = real_client.flushall
            proxy.arm(Fault("request", after[chief.step], 0, "pass"))
            kept.restore()
    assert chief.parameters["w"].tolist() == [until, sum(range(until))]
    one.result(60)
