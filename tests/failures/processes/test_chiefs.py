"""A chief with an optimizer that is killed or stopped at any step: its successor makes the same updates, once each."""

import functools
import signal

import numpy as np
import pytest
from support.leaks import leftovers
from support.local_updates import LocalTraining, differences, gradient_of, state_of
from support.proxy import Fault
from support.selection import everything, thorough

import redisacc
from redisacc.optim import AdamW

pytestmark = pytest.mark.servers("valkey")

NAME = "child"
OPTIMIZER = AdamW(0.01, ema=0.9)
# Leaves whose gradients are rows.
TABLES = ("a",)
# How many updates a chief makes before its successor leads.
UPDATED = 2
WORKERS = 2
# The step up to which a successor leads.
LAST = UPDATED + 1
SMALL, LARGE = 100, 200_000
compute = functools.partial(gradient_of, sparse=TABLES)
CASES = [(size, partitions) for size in (SMALL, LARGE) for partitions in (None, 3)]


def model_of(size):
    """Returns the weights to begin with: of two dtypes."""
    table = np.linspace(-1, 1, 200, dtype=np.float32).reshape(100, 2)
    dense = {"w": np.linspace(-1, 1, size, dtype=np.float32), "b": np.linspace(-1, 1, size // 2), "c": np.ones(3)}
    return {"a": table, **dense}


def open_chief(redis, size, partitions):
    rows = redisacc.types.GradientOptions(sparse=TABLES, partitions=partitions)
    return redisacc.Chief(NAME, model_of(size), workers=WORKERS, optimizer=OPTIMIZER, redis=redis, accumulator=rows)


@pytest.fixture
def working(real_client, background):
    """Begins a training, with workers that train until it is finished."""
    opened = []

    def begin(size, partitions):
        real_client.flushall()
        open_chief(real_client, size, partitions).close()
        running = [background(work, number) for number in range(WORKERS)]
        opened.extend(running)
        return running

    def work(number):
        with redisacc.Worker(NAME, number=number, redis=real_client) as worker:
            for step, parameters in worker.steps():
                worker.apply(compute(number, step, parameters))

    return begin


def check(chief, size, client):
    """Checks that every round was used once."""
    assert chief.step == LAST
    local = LocalTraining(OPTIMIZER, model_of(size), weights=(1.0,) * WORKERS, gradient=compute).train(LAST)
    assert differences(local, chief.latest()[1], state_of(chief)) == []
    assert leftovers(client) == []
    record = f"redisacc:{{{NAME}}}"
    assert client.hmget(record, "takes", "global_step") == [str(LAST).encode()] * 2
    assert not client.exists(f"{record}:taken")


def succeed(client, size, partitions, running, child=None):
    """Finishes the training, and checks it, also after a chief that was stopped has continued."""
    with open_chief(client, size, partitions) as successor:
        for _ in successor.updates(until=LAST):
            pass
        for one in running:
            one.result()
        if child is not None:
            child.signal(signal.SIGCONT)
            # It may find the training finished.
            assert child.value() in ([], [1], [1, 2], "conflict")
        check(successor, size, client)
        successor.delete()


@pytest.mark.slow
@pytest.mark.parametrize("end", thorough([signal.SIGKILL, signal.SIGSTOP], usual=[signal.SIGKILL]))
@pytest.mark.parametrize(("size", "partitions"), thorough(CASES, usual=[(LARGE, 3)]))
def test_a_chief_that_dies_anywhere(proxy, fork, real_client, until, working, size, partitions, end, request, clock):
    def lead():
        try:
            with open_chief(proxy.url, size, partitions) as chief:
                # Not finished, so that the workers stay.
                yield [step for step, _ in zip(chief.updates(), range(UPDATED), strict=False)]
        except redisacc.ConflictError:
            yield "conflict"

    for _ in range(2):
        running = working(size, partitions)
        proxy.arm(None)
        child = fork(lead)
        assert child.value() == [1, 2]
        child.kill()
        lengths = proxy.lengths
        with clock.running():
            succeed(real_client, size, partitions, running)
    faults = [
        Fault(direction, number, offset, "stall")
        for direction in ("request", "reply")
        for number, length in enumerate(lengths[direction])
        for offset in (0, length // 2, None)
    ]
    most = 10**6 if request.config.option.long else 40 if everything(request.config) else 10
    happened = 0
    for number, fault in enumerate(faults[number_of_first(faults, most) :: len(faults) // most + 1]):
        running = working(size, partitions)
        proxy.arm(fault)
        child = fork(lead)
        until(lambda child=child: child.has_value or proxy.happened(0), timeout=30)
        happened += not child.has_value
        if end == signal.SIGKILL:
            child.kill()
            if number % 2:
                # The requests that it had sent still arrive.
                proxy.resume()
            proxy.cut_all()
        else:
            child.signal(end)
        proxy.resume()
        with clock.running():
            succeed(real_client, size, partitions, running, child if end == signal.SIGSTOP else None)
        assert [key for key in real_client.scan_iter() if real_client.pttl(key) == -1] == []
    assert happened


def number_of_first(faults, most):
    """Returns where to begin, so that other places are tried than the first of each message."""
    return min(1, len(faults) // (most + 1))
