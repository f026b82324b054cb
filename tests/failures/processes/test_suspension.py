"""A process that does not run for longer than any lease, at every exchange of every operation.

It goes on as if nothing had happened: no gradient is lost or counted twice, no round is lost, a version is published or
its publisher learns of the other one, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.leaks import leftovers
from support.selection import thorough
from support.suspension import WAYS, Suspension, age
from support.training_options import grouped
from support.until import until

import redisacc
import redisacc.asyncio
from redisacc._admin.garbage import find_garbage, remove_garbage
from redisacc._format import parameter_record
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.partitions import parse_partitions
from redisacc._protocol.parts.sweep import sweep
from redisacc._redis.connect import connect

pytestmark = [pytest.mark.servers("valkey", "cluster"), pytest.mark.usefixtures("force_parts")]

# Elements of a gradient, and of a leaf that has parts for itself.
SIZE, LONG = 60, 150_000
STORAGES = {
    "in place": {"limits": redisacc.Limits(in_place=10**9)},
    "in parts": {"limits": redisacc.Limits(in_place=0)},
    "in partitions": {"limits": redisacc.Limits(in_place=0), "partitions": 3},
    # Every other gradient is compacted with those before.
    "making room": {"limits": redisacc.Limits(in_place=0, buffer=1000)},
    "making room in partitions": {"limits": redisacc.Limits(in_place=0, buffer=1000), "partitions": 3},
}
USUAL_STORAGES = ["in parts", "in partitions"]


@pytest.fixture(params=thorough(STORAGES, usual=USUAL_STORAGES))
def open_stored(request, real_client, open_accumulator):
    """Opens an accumulator with one of the ways to store gradients."""

    def make(**options):
        options = {"reduction_type": "SUM", "redis": real_client, **STORAGES[request.param], **options}
        return open_accumulator("dense", "float32", [SIZE], "w", **options)

    return make


def everywhere(suspension, scene, *, every=1):
    """Plays a scene with a suspension before each exchange of its call, in each way; or before every third, in one."""
    number, happened = 0, True
    while happened:
        for way in WAYS if every == 1 else [WAYS[number % len(WAYS)]]:
            try:
                scene(suspension.at(number, way))
            except BaseException as error:
                error.add_note(f"suspended before exchange {number}, {way}")
                raise
            happened = happened and suspension.happened
        number += every
        assert number < 200
    assert number > every


def nothing_is_left(client):
    """Asserts that nothing is left when all leases are over and somebody has cleaned up."""
    assert leftovers(client) == []
    age(client, 3600)
    transport = connect(client)
    for leftover in find_garbage(transport):
        remove_garbage(transport, leftover)
    assert [key for key in client.scan_iter() if b"partition:" in key or b"part:" in key] == []


@pytest.mark.parametrize("exists", [False, True])
def test_opening(open_stored, real_client, monkeypatch, exists):
    suspension = Suspension(monkeypatch, real_client)

    def scene(suspended):
        real_client.flushall()
        if exists:
            assert open_stored().apply_grad(np.full(SIZE, 1, np.float32))
        with suspended:
            acc = open_stored()
        assert acc.apply_grad(np.full(SIZE, 2, np.float32))
        assert acc.take_grad(1, timeout=600).tolist() == [3 if exists else 2] * SIZE
        nothing_is_left(real_client)

    everywhere(suspension, scene)


def test_an_apply(open_stored, real_client, monkeypatch):
    suspension = Suspension(monkeypatch, real_client)

    def scene(suspended):
        real_client.flushall()
        acc = open_stored()
        for _ in range(3):
            assert acc.apply_grad(np.full(SIZE, 1, np.float32))
        with suspended:
            result = acc.apply_grad(np.full(SIZE, 2, np.float32))
        assert (result.outcome, result.num_accumulated) == ("applied", 4)
        assert acc.apply_grad(np.full(SIZE, 4, np.float32))
        assert acc.take_grad(5, timeout=600).tolist() == [9] * SIZE
        info = acc.info()
        assert (info.num_accumulated, info.unacknowledged, info.waiting) == (0, [], [])
        nothing_is_left(real_client)

    everywhere(suspension, scene)


@pytest.fixture(params=[None, 3], ids=["in parts", "in partitions"])
def open_tree_stored(request, real_client, open_accumulator):
    """Opens an accumulator whose gradients can be uploaded leaf by leaf."""
    spec = {"a": ("float32", (SIZE,)), "b": ("float32", (LONG,))}
    options = {
        "reduction_type": "SUM",
        "redis": real_client,
        "limits": redisacc.Limits(in_place=0),
        "partitions": request.param,
    }
    return lambda: open_accumulator("tree", spec, "w", **options)


def upload(acc, value, between=lambda: None):
    """Uploads the last leaf, and then the first one. What is complete is sent before that."""
    gradient = {"a": np.full(SIZE, value, np.float32), "b": np.full(LONG, value, np.float32)}
    begun = acc._begin(0)
    begun.put(1, gradient["b"])
    due = {part for part, leaves in enumerate(begun.layout.leaves_of) if min(leaves) >= 1}
    assert due
    until(lambda: begun._ended.is_set() or due <= {*begun._written})
    between()
    begun.put(0, gradient["a"])
    return acc._commit(begun, gradient, 1.0, None, "")


def elements(gradient):
    return np.concatenate([gradient["a"], gradient["b"]])


@pytest.mark.slow(keep="in parts")
def test_an_upload(open_tree_stored, real_client, monkeypatch):
    suspension = Suspension(monkeypatch, real_client)

    def scene(suspended):
        real_client.flushall()
        acc = open_tree_stored()
        assert upload(acc, 1)
        with suspended:
            result = upload(acc, 2)
        assert (result.outcome, result.num_accumulated) == ("applied", 2)
        assert upload(acc, 4)
        assert set(elements(acc.take_grad(3, timeout=600))) == {7}
        nothing_is_left(real_client)

    everywhere(suspension, scene)


@pytest.mark.parametrize("others", ["clean up", "wait", "take the round"])
def test_an_upload_between_two_leaves(open_tree_stored, real_client, background, until, monkeypatch, others):
    """As in a debugger. What was sent is gone by then, and others may have added it up already."""
    acc, other = open_tree_stored(), open_tree_stored()
    if others == "wait":
        taking = background(acc.take_grad, 2, timeout=600)
        until(lambda: acc.info().waiting)
    taken = []

    def take_meanwhile():
        if others == "take the round":
            assert upload(other, 4)
            taken.append(set(elements(other.take_grad(1, timeout=600))))

    suspension = Suspension(monkeypatch, real_client, take_meanwhile)
    result = upload(acc, 2, between=suspension.suspend)
    if others == "take the round":
        assert (result.outcome, taken) == ("stale", [{4}])
    else:
        assert (result.outcome, result.num_accumulated) == ("applied", 1)
        assert upload(other, 1)
        found = taking.result() if others == "wait" else other.take_grad(2, timeout=600)
        assert set(elements(found)) == {3}
    nothing_is_left(real_client)


@pytest.mark.slow(keep="in parts")
def test_a_take(open_stored, real_client, monkeypatch):
    suspension = Suspension(monkeypatch, real_client)

    def scene(suspended):
        real_client.flushall()
        acc = open_stored()
        for value in (1, 2):
            assert acc.apply_grad(np.full(SIZE, value, np.float32))
        with suspended:
            # The user's own timeout is on the clock on the wall.
            assert acc.take_grad(2, timeout=600).tolist() == [3] * SIZE
        assert acc.apply_grad(np.full(SIZE, 4, np.float32), local_step=1)
        assert acc.take_grad(1, timeout=600).tolist() == [4] * SIZE
        info = acc.info()
        assert (info.num_accumulated, info.unacknowledged, info.waiting) == (0, [], [])
        nothing_is_left(real_client)

    everywhere(suspension, scene)


@pytest.mark.slow(keep="in parts")
def test_a_recovery(open_stored, real_client, monkeypatch):
    suspension = Suspension(monkeypatch, real_client)

    def scene(suspended):
        real_client.flushall()
        acc = open_stored()
        assert acc.apply_grad(np.full(SIZE, 1, np.float32))
        with pytest.raises(InterruptedError), acc.take(1, timeout=600):
            raise InterruptedError
        with suspended, acc.recover() as found:
            assert found.gradient.tolist() == [1] * SIZE
        assert acc.info().unacknowledged == []
        nothing_is_left(real_client)

    everywhere(suspension, scene)


def test_a_task(real_server, real_client, monkeypatch, everything):
    """On an event loop, an apply and a take."""
    suspension = Suspension(monkeypatch, real_client)

    async def apply_and_take(suspended):
        options = {"reduction_type": "SUM", "redis": real_server.url, **STORAGES["in partitions"]}
        async with redisacc.asyncio.ConditionalAccumulator("float32", [SIZE], "w", **options) as acc:
            with suspended:
                assert await acc.apply_grad(np.full(SIZE, 2, np.float32))
                assert (await acc.take_grad(1, timeout=600)).tolist() == [2] * SIZE

    def scene(suspended):
        real_client.flushall()
        asyncio.run(apply_and_take(suspended))
        nothing_is_left(real_client)

    everywhere(suspension, scene, every=1 if everything else 3)


def test_an_apply_whose_round_is_taken_meanwhile(open_stored, real_client, monkeypatch):
    """Either its gradient is in the round that was taken, or it is stale."""
    taken = []

    def take_meanwhile():
        other = open_stored()
        other.apply_grad(np.full(SIZE, 4, np.float32))
        taken.append(other.take_grad(1, timeout=600)[0])

    suspension = Suspension(monkeypatch, real_client, take_meanwhile)
    seen = set()

    def scene(suspended):
        taken.clear()
        real_client.flushall()
        acc = open_stored()
        with suspended:
            result = acc.apply_grad(np.full(SIZE, 2, np.float32))
        if not suspension.happened:
            take_meanwhile()
        assert (result.outcome, taken) in (("applied", [6]), ("stale", [4]))
        seen.add(result.outcome)
        nothing_is_left(real_client)

    everywhere(suspension, scene)
    assert seen == {"applied", "stale"}


def tree(step):
    return {"table": np.full((20, 3), step, np.float32), "bias": np.full(4, -step, np.float32)}


def step_of(found):
    """Returns the step of a version, of which everything must be of that step."""
    step, values = found
    assert all(np.array_equal(values[name], array) for name, array in tree(step).items())
    return step


@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize("first", thorough([True, False], usual=[True]), ids=["first", "later"])
def test_a_publication(real_client, monkeypatch, partitions, first):
    monkeypatch.setattr(parameter_record, "SINGLE_PART_BYTES", 0)
    suspension = Suspension(monkeypatch, real_client)

    def scene(suspended):
        real_client.flushall()
        handle = redisacc.Parameters("w", redis=real_client, partitions=partitions)
        for step in range(0 if first else 2):
            handle.publish(tree(step), step)
        with suspended:
            handle.publish(tree(2), 2, changed=None if first else {"table": range(20)}, state=[np.full(9, 2)])
        reader = redisacc.Parameters("w", redis=real_client)
        assert step_of(reader.latest()) == 2
        assert reader.latest_state()[1][0].tolist() == [2] * 9
        handle.publish(tree(3), 3)
        assert step_of(reader.latest()) == 3
        assert leftovers(real_client) == []
        handle.delete()
        nothing_is_left(real_client)

    everywhere(suspension, scene)


@pytest.mark.slow(keep="others")
@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize("values", ["the same", "others"])
def test_a_publication_that_somebody_else_makes_meanwhile(real_client, monkeypatch, partitions, values):
    """With other values, one of the two publishers is told, and everybody reads what the other one has published."""
    monkeypatch.setattr(parameter_record, "SINGLE_PART_BYTES", 0)
    refused = []

    def publish_meanwhile():
        other = redisacc.Parameters("w", redis=real_client)
        try:
            other.publish(tree(1) if values == "the same" else dict.fromkeys(("table", "bias"), 0) | like(9), 1)
        except redisacc.ConflictError:
            refused.append("other")

    def like(value):
        return {name: np.full_like(array, value) for name, array in tree(1).items()}

    suspension = Suspension(monkeypatch, real_client, publish_meanwhile)
    seen = set()

    def scene(suspended):
        refused.clear()
        real_client.flushall()
        handle = redisacc.Parameters("w", redis=real_client, partitions=partitions)
        handle.publish(tree(0), 0)
        with suspended:
            try:
                handle.publish(tree(1), 1)
            except redisacc.ConflictError:
                refused.append("suspended")
        step, found = redisacc.Parameters("w", redis=real_client).latest()
        assert step == 1
        if values == "the same" or not suspension.happened:
            assert refused == []
            assert step_of((step, found)) == 1
        else:
            assert len(refused) == 1
            assert found["bias"].tolist() == [-1 if refused == ["other"] else 9] * 4
            seen.update(refused)
        handle.publish(tree(2), 2)
        assert step_of(redisacc.Parameters("w", redis=real_client).latest()) == 2
        handle.delete()
        nothing_is_left(real_client)

    everywhere(suspension, scene)
    assert seen == (set() if values == "the same" else {"other", "suspended"})


def test_a_publication_on_which_somebody_else_builds_meanwhile(real_client, monkeypatch):
    """The next version keeps blobs of the one that was published just before, whose publisher does not know it yet."""
    monkeypatch.setattr(parameter_record, "SINGLE_PART_BYTES", 0)
    built = []

    def publish_next():
        other = redisacc.Parameters("w", redis=real_client)
        step, _ = other.latest()
        if step == 1:
            table = tree(1)["table"].copy()
            table[0] = 5
            other.publish({**tree(1), "table": table}, 2, changed={"table": [0], "bias": []})
            built.append(step)

    suspension = Suspension(monkeypatch, real_client, publish_next)
    seen = set()

    def scene(suspended):
        built.clear()
        real_client.flushall()
        handle = redisacc.Parameters("w", redis=real_client, partitions=3)
        handle.publish(tree(0), 0)
        with suspended:
            try:
                handle.publish(tree(1), 1)
                outcome = "published"
            except redisacc.ConflictError:
                outcome = "conflict"
        seen.add((outcome, len(built)))
        if not built:
            publish_next()
        step, found = redisacc.Parameters("w", redis=real_client).latest()
        assert (step, found["bias"].tolist()) == (2, [-1] * 4)
        assert found["table"][:, 0].tolist() == [5, *[1] * 19]
        handle.delete()
        nothing_is_left(real_client)

    everywhere(suspension, scene)
    # Somebody built on it after its publisher knew, and also before that: then the connection had broken, or not.
    assert seen == {("published", 0), ("published", 1), ("conflict", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("partitions", thorough([None, 3], usual=[3]))
def test_a_training(real_client, monkeypatch, partitions, everything):
    """A chief and a worker in one process, so both are suspended, and neither has another one in its place."""
    monkeypatch.setattr(parameter_record, "SINGLE_PART_BYTES", 0)
    suspension = Suspension(monkeypatch, real_client)
    options = {"redis": real_client, "patience": 20}

    def scene(suspended):
        real_client.flushall()
        settings = {
            "workers": 1,
            "reduction_type": "SUM",
            "partitions": partitions,
            "limits": redisacc.Limits(in_place=0),
        }
        with (
            suspended,
            redisacc.Chief("w", np.zeros(SIZE), **grouped({**settings, **options})) as chief,
            redisacc.Worker("w", **options) as worker,
        ):
            steps, rounds = worker.steps(), chief.rounds(until=2)
            for step in range(2):
                assert next(steps)[0] == step
                assert worker.apply(np.full(SIZE, step + 1.0))
                taken = next(rounds)
                assert taken.num_accumulated == 1
                chief.publish(chief.parameters + taken.gradient)
            assert list(rounds) == list(steps) == []
            assert chief.parameters.tolist() == [3] * SIZE
            assert redisacc.Parameters("w", redis=real_client).latest()[1].tolist() == [3] * SIZE
            chief.delete()
        nothing_is_left(real_client)

    everywhere(suspension, scene, every=1 if everything else 3)


# What a process does that stops itself at one place: between writing the parts of something and counting it.
STOPPED = """
import os, signal, sys, time
import numpy as np
import redisacc
from redisacc._protocol.applying import buffer_writer, partition_writer, upload
from redisacc._protocol.parameters import publisher
from redisacc._protocol.scripts import applying
from redisacc._protocol.scripts.parameters import ParameterScripts
from redisacc._protocol.scripts.partitions import PartitionScripts
from redisacc._redis import running_time
from redisacc._clock import durations

what, url, speed = sys.argv[1:]
if speed == "short":
    partition_writer.ATTEMPT_MS, partition_writer.BYTES_PER_MS = 1500, 10**6
    durations.call = durations.lease = 1.0
    running_time.LONGEST_GAP = 0.3
    upload.STAGING_MS = applying.STAGING_MS = 1500

def stop_before(owner, name):
    method = getattr(owner, name)
    def stopped(*args, **options):
        setattr(owner, name, method)
        os.kill(os.getpid(), signal.SIGSTOP)
        return method(*args, **options)
    setattr(owner, name, stopped)

if what == "worker":
    stop_before(PartitionScripts, "commit")
    with redisacc.Worker("w", redis=url) as worker:
        print([(step, worker.apply(np.full(LENGTH, step + 1.0)).outcome) for step, _ in worker.steps()])
elif what == "uploader":
    with redisacc.Worker("w", redis=url) as worker:
        for step, weights in worker.steps():
            begun = worker.begin()
            begun.put("b", weights["b"] + step + 1)
            if step == 0:
                while not begun._streamed._written:
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGSTOP)
            begun.put("a", weights["a"] + step + 1)
            print(step, begun.commit().outcome)
else:
    handle = redisacc.Parameters("w", redis=url)
    stop_before(ParameterScripts, "publish")
    try:
        handle.publish(np.full(LENGTH, 7.0), 1)
        print("published")
    except redisacc.ConflictError:
        print("conflict")
"""
# Elements of what it sends: 1 MB.
LENGTH = 131_072


@pytest.fixture
def stopped(real_server, until, request):
    """Starts a process that stops itself. Returns it when its lease is over, and what it began is gone.

    With --long, this takes 68 seconds, as in earnest. Otherwise, its leases and its patience are shorter.
    """
    is_long = request.config.option.long
    processes = []

    def start(what, is_gone):
        script = STOPPED.replace("LENGTH", str(LENGTH))
        command = [sys.executable, "-c", script, what, real_server.url, "long" if is_long else "short"]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        _, status = os.waitpid(processes[-1].pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        until(is_gone, timeout=120)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def swept(client, kind=Keys):
    """Removes what is in partitions after its lease, and returns whether there was anything."""
    return sweep(connect(client), kind("w", parse_partitions(client.hget(kind("w").record, "partitions").decode())))


def wake(process):
    """Lets a process continue, and returns what it says until it ends."""
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said.strip()


@pytest.mark.slow
def test_a_worker_that_was_really_stopped(stopped, real_client, background):
    chief = redisacc.Chief(
        "w",
        np.zeros(LENGTH),
        workers=1,
        redis=real_client,
        accumulator={"partitions": 3, "limits": redisacc.Limits(in_place=0)},
    )

    def lead():
        for taken in chief.rounds(until=2):
            assert taken.num_accumulated == 1
            chief.publish(chief.parameters + taken.gradient)

    with chief:
        leading = background(lead)
        process = stopped("worker", lambda: swept(real_client))
        assert wake(process) == "[(0, 'applied'), (1, 'applied')]"
        leading.result(60)
        assert set(chief.parameters.tolist()) == {3.0}
        assert leftovers(real_client) == []
        chief.delete()


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [None, 3])
def test_a_worker_that_was_really_stopped_between_two_leaves(stopped, real_client, background, partitions):
    weights = dict.fromkeys("ab", np.zeros(LENGTH))
    chief = redisacc.Chief(
        "w",
        weights,
        workers=1,
        redis=real_client,
        accumulator={"partitions": partitions, "limits": redisacc.Limits(in_place=0)},
    )

    def lead():
        for taken in chief.rounds(until=2):
            chief.publish({path: chief.parameters[path] + taken.gradient[path] for path in "ab"})

    def expired():
        return not any(b":staged:" in key for key in real_client.scan_iter())

    with chief:
        leading = background(lead)
        process = stopped("uploader", expired if partitions is None else lambda: swept(real_client))
        assert wake(process).split() == ["0", "applied", "1", "applied"]
        leading.result(60)
        # A gradient is the weights and 1 or 2, so they are 1 and then 1 + 1 + 2.
        assert {path: set(found) for path, found in chief.parameters.items()} == {"a": {4.0}, "b": {4.0}}
        assert leftovers(real_client) == []
        chief.delete()


@pytest.mark.slow
@pytest.mark.parametrize("values", thorough(["the same", "others"], usual=["others"]))
def test_a_publisher_that_was_really_stopped(stopped, real_client, values):
    with redisacc.Parameters("w", redis=real_client, partitions=3) as handle:
        handle.publish(np.zeros(LENGTH), 0)
        process = stopped("publisher", lambda: swept(real_client, ParameterKeys))
        value = 7.0 if values == "the same" else 9.0
        handle.publish(np.full(LENGTH, value), 1)
        assert wake(process) == ("published" if values == "the same" else "conflict")
        assert set(handle.latest()[1].tolist()) == {value}
        assert leftovers(real_client) == []
        handle.delete()
