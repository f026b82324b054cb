"""The monitor, on a single server and on a cluster."""

import pytest

from redisacc._format.keys import Keys
from redisacc._wire.connect import connect
from redisacc.tools.monitoring.monitor import Monitor
from redisacc.tools.monitoring.nodes import read_nodes


@pytest.fixture
def watch(real_server):
    """Makes a monitor of the test's server, which is closed when the test ends."""
    made = []

    def monitor(*patterns, keys=()):
        made.append(Monitor(connect(real_server.url), patterns, keys))
        return made[-1]

    yield monitor
    for each in made:
        each.close()


@pytest.mark.servers("valkey", "cluster")
def test_every_accumulator_is_read_and_heard(watch, real_server, open_dense, open_parameters, until, server_name):
    accs = {name: open_dense("float32", [2], name) for name in ("a", "b", "c")}
    parameters = open_parameters("b")
    monitor = watch("*")
    monitor.refresh()
    assert [view.info for view in monitor.views.values()] == [acc.info() for acc in accs.values()]
    assert len(monitor.nodes) == (3 if server_name == "cluster" else 1)
    assert all(node.used_memory > 0 and node.version for node in monitor.nodes)
    for acc in accs.values():
        acc.apply_grad([1.0, 2.0])
        acc.take_grad(1)
    parameters.publish([1.0], 1)

    def all_heard():
        monitor.refresh()
        return (
            all(view.heard.rounds for view in monitor.views.values()) and monitor.views["b"].heard.rounds[0].published
        )

    until(all_heard)
    assert [view.heard.rounds[0].nbytes for view in monitor.views.values()] == [8, 8, 8]
    accs["c"].delete()
    monitor.refresh()
    assert list(monitor.views) == ["a", "b"]
    for name in ("a", "b"):
        accs[name].delete()


@pytest.mark.servers("valkey")
def test_a_private_accumulator_can_be_named(watch, open_dense, until):
    acc, _other = open_dense("float32", [2]), open_dense("float32", [2], "other")
    name = acc.info().name
    monitor = watch(keys=[Keys(name)])
    acc.apply_grad([1.0, 2.0])
    acc.take_grad(1)
    until(lambda: monitor.refresh() or monitor.views[name].heard.rounds)
    assert list(monitor.views) == [name]


@pytest.mark.servers("cluster")
def test_a_cluster_with_many_accumulators_is_heard_in_part(watch, open_dense, until):
    accs = [open_dense("float32", [1], f"w-{n}") for n in range(65)]
    monitor = watch("*")
    monitor.refresh()
    for acc in accs:
        acc.apply_grad([1.0])
        acc.take_grad(1)
    until(lambda: monitor.refresh() or len([view for view in monitor.views.values() if view.heard.rounds]) == 64)
    # Everything that the record tells is there for all of them.
    assert [view.info.takes for view in monitor.views.values()] == [1] * 65
    for acc in accs:
        acc.delete()


@pytest.mark.servers("valkey")
def test_names_that_anybody_makes_up_fill_no_memory(watch, real_client, open_dense, until):
    monitor = watch("*")
    listener = monitor._listen()
    until(real_client.pubsub_numpat)
    with real_client.pipeline() as pipeline:
        for n in range(5001):
            pipeline.publish(f"redisacc:{{made-up-{n}}}:events", "applied step=0 count=1 worker=x")
        pipeline.execute()
    until(lambda: list(listener._histories) == ["made-up-5000"])
    acc = open_dense("float32", [1], "w")
    monitor.refresh()
    assert len(listener._histories) == 0
    acc.apply_grad([1.0])
    until(lambda: list(listener._histories) == ["w"])


@pytest.mark.servers("valkey")
def test_a_user_who_may_not_run_info_sees_no_numbers(real_server, real_client):
    real_client.execute_command("ACL", "SETUSER", "blind", "on", ">secret", "~*", "&*", "+@all", "-info")
    try:
        transport = connect(real_server.url.replace("redis://", "redis://blind:secret@"))
        (node,) = read_nodes(transport)
        assert (node.address, node.version, node.used_memory) == (transport.address, "", None)
    finally:
        real_client.execute_command("ACL", "DELUSER", "blind")
