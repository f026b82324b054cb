"""Uploads whose leaves are put one by one."""

import asyncio
import codecs
import re
import socket

import numpy as np
import pytest
from support.leaks import leftovers, written
from support.local_updates import LocalTraining, differences

import redisacc
import redisacc.asyncio
from redisacc.optim import AdamW

pytestmark = pytest.mark.servers("valkey")

SHAPES = {"a": (200, 300), "b": (150_001,), "c": (3,), "d": (100_000,)}


def zeros():
    return {path: np.zeros(shape, np.float32) for path, shape in SHAPES.items()}


def gradient_of(number):
    rng = np.random.default_rng(number)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}


def staged(client):
    """The places and the parts that no round has yet: in one slot, they have an expiry."""
    return written(client) + list(client.scan_iter("redisacc:{train*:partition:part:*"))


def attempts(client):
    return dict(client.zrange("redisacc:{train}:attempts", 0, -1, withscores=True))


# In one instant, so that no upload is counted between the look and the removal.
LOSE = """
local lost, names = {KEYS[1]}, {}
for _, attempt in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do names[#names + 1] = string.match(attempt, '^%S+') end
for _, key in ipairs(redis.call('KEYS', 'redisacc:{train*:p*')) do
  local goes_on = string.match(key, '}:part:') or string.match(key, '}:place:')
  goes_on = goes_on and redis.call('PTTL', key) >= 0
  for _, name in ipairs(names) do goes_on = goes_on or string.find(key, name, 1, true) end
  if goes_on then lost[#lost + 1] = key end
end
return redis.call('DEL', unpack(lost))
"""


def lose(client):
    """Removes the parts of uploads that go on, and their list, as if nobody had renewed them for long."""
    return client.eval(LOSE, 1, "redisacc:{train}:attempts")


# After this many seconds, an upload has been renewed.
RENEWED = 1.0


@pytest.mark.parametrize("partitions", [None, 3])
def test_parts_leave_early_and_abandoning_removes_them(training, until, partitions):
    training.chief(zeros(), limits=redisacc.Limits(in_place=0), partitions=partitions)
    worker = training.worker()
    next(worker.steps())
    gradient = gradient_of(0)
    upload = worker.begin()
    upload.put("d", gradient["d"])
    upload.put("b", gradient["b"])
    until(lambda: len(staged(training.client)) > 1)
    upload.abandon()
    assert staged(training.client) == []
    assert not attempts(training.client)
    assert worker.apply(gradient).outcome == "applied"
    with pytest.raises(redisacc.InvalidArgumentError, match="has ended"):
        upload.put("a", gradient["a"])


def test_what_is_wrong_is_named_and_may_be_mended(training):
    training.chief(zeros(), limits=redisacc.Limits(in_place=0))
    worker = training.worker()
    with pytest.raises(redisacc.InvalidArgumentError, match="loop over steps"):
        worker.begin()
    next(worker.steps())
    gradient = gradient_of(0)
    with worker.begin() as upload:
        with pytest.raises(redisacc.InvalidArgumentError, match="'x' is not the path of a leaf"):
            upload.put("x", gradient["a"])
        with pytest.raises(redisacc.InvalidArgumentError, match=r"grad at 'a' must have the declared shape"):
            upload.put("a", gradient["d"])
        upload.put("a", gradient["a"])
        with pytest.raises(redisacc.InvalidArgumentError, match="'a' was put before: put each leaf once"):
            upload.put("a", gradient["a"])
        with pytest.raises(
            redisacc.InvalidArgumentError,
            match="lacks 'b', 'c', 'd': put each leaf, and None for one that has no gradient",
        ):
            upload.commit()
        for path in "bc":
            upload.put(path, gradient[path])
        upload.put("d", None)
        assert upload.commit(weight=2.0, metrics={"loss": 1.0})
    assert training.record[b"num_accumulated"] == b"1"


@pytest.mark.parametrize("partitions", [None, 3])
def test_it_ends_early_if_the_step_is_over(training, clock, partitions):
    chief = training.chief(zeros(), limits=redisacc.Limits(in_place=0), partitions=partitions)
    rounds = chief.rounds()
    slow, fast = training.worker(), training.worker()
    next(slow.steps())
    next(fast.steps())
    upload = slow.begin()
    upload.put("d", gradient_of(0)["d"])
    fast.apply(gradient_of(1))
    next(rounds)
    clock.advance(RENEWED)
    for path in "abc":
        upload.put(path, gradient_of(0)[path])
    assert upload.commit().outcome == "stale"
    assert training.record[b"stale"] == b"1"


@pytest.mark.parametrize("partitions", [None, 3])
def test_an_upload_whose_parts_are_lost_is_sent_again(training, until, partitions):
    training.chief(zeros(), limits=redisacc.Limits(in_place=0), partitions=partitions)
    worker = training.worker()
    next(worker.steps())
    gradient = gradient_of(0)
    upload = worker.begin()
    for path in "dba":
        upload.put(path, gradient[path])
    until(lambda: len(staged(training.client)) > 2)
    assert lose(training.client) > 2
    upload.put("c", gradient["c"])
    assert upload.commit().outcome == "applied"
    with redisacc.TreeAccumulator.like(
        zeros(),
        "train",
        reduction_type="SUM",
        redis=training.client,
        once_per_worker=True,
        partitions=partitions,
        limits=redisacc.Limits(in_place=0),
    ) as gradients:
        peeked = gradients.peek().gradient
    assert all(np.array_equal(peeked[path], gradient[path]) for path in SHAPES)


@pytest.mark.slow(keep="3-True")
@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("partitions", [None, 3])
def test_reducers_update_with_the_bits_of_an_undisturbed_training(
    training, background, reducing, partitions, loses, clock, until
):
    """Each worker streams in another order, and pauses for longer than others wait for it, or loses its parts."""
    optimizer, crew, steps = AdamW(0.01), 3, 3
    chief = training.chief(zeros(), workers=crew, optimizer=optimizer, reduction_type="MEAN", partitions=partitions)
    reducing(wanted=crew)

    def compute(number, step, parameters):
        gradient = gradient_of(10 * step + number)
        return {path: gradient[path] + parameters[path] for path in SHAPES}

    def work(number):
        worker = training.worker(number)
        for step, parameters in worker.steps():
            gradient = compute(number, step, parameters)
            upload = worker.begin()
            for place, path in enumerate(np.random.default_rng(number + step).permutation(list(SHAPES))):
                upload.put(str(path), gradient[str(path)])
                if place == 1 and number == step % crew:
                    if loses:
                        until(lambda: lose(training.client))
                    else:
                        clock.advance(0.5)
            assert upload.commit()

    working = [background(work, number) for number in range(crew)]
    for _ in chief.updates(until=steps):
        pass
    for one in working:
        one.result(30)
    local = LocalTraining(optimizer, zeros(), weights=(1.0,) * crew, gradient=compute).train(steps)
    step, found = chief.latest()
    state = chief.latest_state()[1]
    assert step == steps
    assert differences(local, found, {slot: state[slot] for slot in optimizer.slots}) == []


def test_a_renewal_that_arrives_late_gives_no_expiry_to_parts_that_count(training, clock, until, real_server):
    training.chief(zeros(), limits=redisacc.Limits(in_place=0))
    worker = training.worker()
    next(worker.steps())
    gradient = gradient_of(0)
    upload = worker.begin()
    upload.put("d", gradient.pop("d"))
    upload.put("b", gradient.pop("b"))
    until(lambda: len(staged(training.client)) > 1)
    with socket.create_connection(("127.0.0.1", real_server.port)) as monitor:
        monitor.sendall(b"MONITOR\r\n")
        # By then, the expiry of parts has been renewed.
        clock.advance(20.0)
        lines = (line for line in monitor.makefile("rb") if b'"EVAL' in line and b'"redisacc:{train}:part:' in line)
        renewal = [codecs.escape_decode(text)[0] for text in re.findall(rb'"((?:[^"\\]|\\.)*)"', next(lines))]
    for path, elements in gradient.items():
        upload.put(path, elements)
    assert upload.commit()
    assert training.client.execute_command(*renewal) == [b"over"]
    # As if a worker could have several gradients in a round.
    training.client.hset("redisacc:{train}", "once_per_worker", 0)
    assert training.client.execute_command(*renewal) == [b"renewed"]
    assert staged(training.client) == []


def test_the_parts_of_a_commit_that_fails_expire(training, until):
    """A key has another type, so the script fails before it does anything."""
    training.chief(zeros(), limits=redisacc.Limits(in_place=0))
    worker = training.worker()
    next(worker.steps())
    upload = worker.begin()
    for path, elements in gradient_of(0).items():
        upload.put(path, elements)
    until(lambda: len(staged(training.client)) > 3)
    training.client.set("redisacc:{train}:buffered", "another type")
    with pytest.raises(redisacc.CorruptDataError):
        upload.commit()
    training.client.delete("redisacc:{train}:buffered")
    # A copy of the commit may have counted them.
    assert staged(training.client) != []
    assert leftovers(training.client) == []


def test_the_lease_is_renewed(training, clock, until):
    training.chief(zeros(), limits=redisacc.Limits(in_place=0), partitions=3)
    worker = training.worker()
    next(worker.steps())
    upload = worker.begin()
    upload.put("d", gradient_of(0)["d"])
    until(lambda: attempts(training.client))
    ends = []
    for _ in range(3):
        clock.advance(RENEWED)
        ends += attempts(training.client).values()
    assert ends == sorted(set(ends))
    assert len(ends) == 3
    worker.close()
    assert not attempts(training.client)
    assert staged(training.client) == []


def test_small_and_sparse_gradients_are_collected(training):
    training.chief({"w": np.zeros(2, np.int64), "e": np.zeros((9, 2), np.float32)}, sparse=["e"])
    worker = training.worker()
    next(worker.steps())
    with worker.begin() as upload:
        upload.put("w", [1, 2])
        upload.put("e", redisacc.IndexedSlices([[1.0, 2.0]], [4]))
        assert upload.commit().outcome == "applied"


def test_asyncio(training):
    training.chief(zeros(), limits=redisacc.Limits(in_place=0))

    async def work(where):
        async with redisacc.asyncio.Worker("train", redis=where) as worker:
            async for _ in worker.steps():
                gradient = gradient_of(0)
                async with await worker.begin() as upload:
                    upload.put("d", gradient["d"])
                    await asyncio.sleep(0.05)
                assert staged(training.client) == []
                upload = await worker.begin()
                for path in "dcba":
                    upload.put(path, gradient[path])
                return await upload.commit()

    arguments = training.client.connection_pool.connection_kwargs
    where = f"redis://{arguments['host']}:{arguments['port']}/{arguments.get('db', 0)}" if "host" in arguments else None
    assert asyncio.run(work(where or f"unix://{arguments['path']}")).outcome == "applied"
