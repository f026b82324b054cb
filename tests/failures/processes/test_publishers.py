"""A publisher that is killed at any step: readers see one version or the other, and a successor goes on."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support.fork_server import NAME, publish_next, version
from support.leaks import leftovers, remaining
from support.proxy import Fault
from support.selection import everything, thorough

import redisacc

pytestmark = pytest.mark.servers("valkey")

SMALL, LARGE = 6, 700_000


def whole(found, size):
    """Returns the step of a version, of which everything must be of that step."""
    step, tree = found
    expected = version(step, size)
    assert all(np.array_equal(tree[name], expected[name]) for name in expected)
    return step


def begin(client, size, partitions=None):
    """Publishes a version, and returns its publisher and a reader who has read it."""
    client.flushall()
    first = redisacc.Parameters(NAME, redis=client, partitions=partitions)
    reader = redisacc.Parameters(NAME, redis=client)
    first.publish(version(1, size), 1, state=[np.full(size, 1)])
    assert whole(reader.latest(), size) == 1
    return first, reader


CASES = [(size, partitions) for partitions in (None, 3) for size in (SMALL, LARGE)]


@pytest.mark.slow(keep="-6-")
@pytest.mark.parametrize("end", thorough([signal.SIGKILL, signal.SIGSTOP], usual=[signal.SIGKILL]))
@pytest.mark.parametrize(("size", "partitions"), thorough(CASES, usual=[(SMALL, None), (LARGE, None), (LARGE, 3)]))
def test_a_publisher_that_dies_anywhere(
    proxy, child_processes, real_client, until, size, partitions, end, request, clock
):
    """In partitions, between the registration, the writes to the nodes and the commit, too."""
    for _ in range(2):
        begin(real_client, size, partitions)
        proxy.arm(None)
        child = child_processes.start("publish", 0, size)
        until(lambda child=child: child.done)
        lengths = proxy.lengths
    faults = [
        Fault(direction, number, offset, "stall")
        for direction in ("request", "reply")
        for number, length in enumerate(lengths[direction])
        for offset in (0, length // 2, None)
    ]
    most = 10**6 if request.config.option.long else 20 if everything(request.config) else 6
    for number, fault in enumerate(faults[:: len(faults) // most + 1]):
        _, reader = begin(real_client, size, partitions)
        proxy.arm(fault)
        child = child_processes.start("publish", 0, size)
        assert proxy.happened(), fault
        child.signal(end)
        if end == signal.SIGKILL:
            until(lambda child=child: child.gone)
            if number % 2:
                # The requests that it had sent still arrive.
                proxy.resume()
            proxy.cut_all()
        proxy.resume()
        with clock.running():
            step = whole(reader.latest(), size)
            assert step in (1, 2)
            # A successor computes the same again, and publishes it whether or not it is there.
            successor = redisacc.Parameters(NAME, redis=real_client)
            successor.latest()
            state = successor.latest_state()
            assert set(state[1][0].tolist()) == {state[0]}
            for again in (2, 3):
                successor.publish(
                    version(again, size), again, changed={"table": range(again + 1)}, state=[np.full(size, again)]
                )
                assert whole(reader.wait(after=again - 1, timeout=20), size) == again
            if end == signal.SIGSTOP:
                child.signal(signal.SIGCONT)
                until(lambda child=child: child.done)
                # It has found the next step if it was stopped before it had looked.
                assert child.value in (2, 4, "ConflictError")
            last = 4 if end == signal.SIGSTOP and child.value == 4 else 3
            assert whole(reader.latest(), size) == last
            assert whole(redisacc.Parameters(NAME, redis=real_client).latest(), size) == last
            assert leftovers(real_client) == []
            successor.delete()
            # What was staged, or written and not persisted, expires.
            left = [key for key in real_client.scan_iter() if real_client.pttl(key) == -1]
            assert left == []


def test_many_publishers_one_after_the_other(child_processes, real_client, until):
    begin(real_client, SMALL)
    for step in range(2, 8):
        child = child_processes.start("publish", 0, SMALL)
        until(lambda child=child: child.done)
        assert child.value == step
    assert publish_next(redisacc.Parameters(NAME, redis=real_client), SMALL) == 8


def test_a_copy_is_a_handle_on_the_same_parameters(real_server, real_client):
    handle = redisacc.Parameters("w", redis=real_server.url, name="label", publisher="ann")
    empty = pickle.loads(pickle.dumps(handle))
    assert empty.latest() is None
    handle.publish(np.ones(3), 0)
    again = pickle.loads(pickle.dumps(handle))
    assert (repr(again), again.name) == (repr(handle), "label")
    again.publish(np.zeros(3), 1)
    assert real_client.hget("redisacc:{w}:parameters", "publisher") == b"ann"
    assert handle.latest()[0] == 1
    held = pickle.dumps(handle)
    handle.delete()
    empty.publish(np.ones(3), 5)
    with pytest.raises(redisacc.NotFoundError, match="parameters"):
        pickle.loads(held)


def test_what_cannot_be_pickled(real_client, real_server):
    with pytest.raises(TypeError, match="opened with a client"):
        pickle.dumps(redisacc.Parameters("w", redis=real_client))
    url = real_server.url.replace("redis://", "redis://default:secret@")
    real_client.config_set("requirepass", "secret")
    try:
        with pytest.raises(TypeError, match="holds a password") as caught:
            pickle.dumps(redisacc.Parameters("w", redis=url))
        assert "secret" not in str(caught.value)
    finally:
        real_client.config_set("requirepass", "")


@pytest.mark.slow
def test_a_forked_child_reads_and_publishes(real_server, real_client):
    program = """
        import os, sys, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import numpy as np, redisacc
        weights = redisacc.Parameters("w", redis=sys.argv[1])
        table = np.zeros((100, 2))
        weights.publish(table, 0)
        assert weights.latest()[0] == 0
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert weights.latest()[1].tolist() == table.tolist()
                table[3] = 1
                weights.publish(table, 1, changed={".": [3]})
                assert weights.wait(after=0, timeout=20)[1].tolist() == table.tolist()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert weights.wait(after=0, timeout=20)[1][3].tolist() == [1, 1]
        weights.delete()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), real_server.url],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert remaining(real_client) == []
