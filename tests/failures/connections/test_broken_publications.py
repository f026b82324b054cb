"""Publishing, reading, waiting and deleting, with the connection broken at every place."""

from __future__ import annotations

import numpy as np
import pytest
from support.fork_server import version
from support.leaks import leftovers, remaining
from support.proxy import all_faults
from support.servers import CLUSTER

import redisacc

pytestmark = pytest.mark.servers("valkey", CLUSTER)


def publish(through, size):
    through.publish(version(1, size), 1, changed={"table": [0, 1]}, state=[np.full(size, 1)])
    return 1


def latest(through, size):
    return through.latest()[0]


def latest_state(through, size):
    step, (state,) = through.latest_state()
    assert set(state.tolist()) == {step}
    return step


def wait(through, size):
    return through.wait(after=-1, timeout=30)[0]


def delete(through, size):
    return through.delete()


# What is done, the step that it returns, and the step afterwards.
OPERATIONS = {
    "publish": (publish, 1, 1),
    "latest": (latest, 0, 0),
    "latest_state": (latest_state, 0, 0),
    "wait": (wait, 0, 0),
    "delete": (delete, None, None),
}


@pytest.fixture
def scene(proxy, real_client):
    def begin(size):
        real_client.flushall()
        direct = redisacc.Parameters("w", redis=real_client)
        through = redisacc.Parameters("w", redis=proxy.where)
        through.publish(version(0, size), 0, state=[np.full(size, 0)])
        through.step()
        direct.latest()
        return direct, through

    return begin


def check(direct, real_client, size, step):
    """Checks that the version of this step is there, whole, for a reader who has the one before and for a new one."""
    if step is None:
        with pytest.raises(redisacc.NotFoundError, match="parameters"):
            direct.latest()
        assert remaining(real_client) == []
        return
    for reader in (direct, redisacc.Parameters("w", redis=real_client)):
        found, tree = reader.latest()
        assert found == step
        assert all(np.array_equal(tree[name], value) for name, value in version(step, size).items())
    # A late copy of what stored them gives them no expiry.
    assert {real_client.pttl(key) for key in parts_of(real_client)} == {-1}
    assert leftovers(real_client) == []


def parts_of(client):
    """The keys of the parts of the latest version."""
    record = "redisacc:{w}:parameters"
    listed = b" ".join(filter(None, client.hmget(record, "full", "rows", "state")))
    blobs = {entry.partition(b":")[0] for entry in listed.split()}
    return [key for key in client.scan_iter(f"{record}:object:*") if key.split(b":")[-2] in blobs]


@pytest.mark.slow(keep="small")
@pytest.mark.parametrize("size", [8, 600_000], ids=["small", "large"])
@pytest.mark.parametrize("what", OPERATIONS)
def test_a_connection_that_breaks_anywhere(proxy, scene, real_client, what, size, request, everything):
    operation, value, step = OPERATIONS[what]
    for _ in range(2):
        direct, through = scene(size)
        proxy.arm(None)
        operation(through, size)
        faults = list(all_faults(proxy.lengths))
    late = [fault for fault in faults if fault.action == "late"]
    rest = [fault for fault in faults if fault.action != "late"]
    if not request.config.getoption("--long"):
        most = 20 if everything else 4
        faults = late[:2] + rest[:: len(rest) // most + 1]
    for fault in faults:
        direct, through = scene(size)
        proxy.arm(fault)
        try:
            assert operation(through, size) == value
            assert proxy.happened(), fault
            check(direct, real_client, size, step)
            proxy.deliver_late()
            check(direct, real_client, size, step)
            if step is not None:
                through.publish(version(step + 1, size), step + 1, changed={"table": range(step + 2)})
                check(direct, real_client, size, step + 1)
                # Late copies of what was published before change nothing, either.
                proxy.deliver_late()
                check(direct, real_client, size, step + 1)
        except BaseException as error:
            error.add_note(str(fault))
            raise
        finally:
            proxy.arm(None)


@pytest.mark.slow
def test_replies_that_come_byte_by_byte(proxy, scene, real_client):
    for operation, value, step in OPERATIONS.values():
        direct, through = scene(8)
        proxy.bytewise = True
        assert operation(through, 8) == value
        check(direct, real_client, 8, step)
        proxy.bytewise = False


def test_a_wait_goes_on_when_its_connections_break(proxy, scene, background, until):
    direct, through = scene(8)
    waiting = background(through.wait, 0, 60)
    until(lambda: {"SUBSCRIBE", "SSUBSCRIBE"}.intersection(proxy.sent))
    for _ in range(3):
        proxy.cut_all()
    direct.latest()
    direct.publish(version(1, 8), 1)
    assert waiting.result(60)[0] == 1
