"""What others do while a process does not run, or its connection is broken, that no table of operations has."""

import signal

import numpy as np
import pytest
from faults import Suspended
from operations import FOREVER, OPERATIONS, Apply, Publish, value_of
from support.selection import thorough

import redisacc

pytestmark = pytest.mark.servers("valkey")


def opened(where, in_place=10**9):
    limits = redisacc.Limits(in_place=in_place)
    return redisacc.ConditionalAccumulator("float32", [6], "w", reduction_type="SUM", redis=where, limits=limits)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_queue_goes_on_without_its_head(fork, proxy, real_client, until, clock, end):
    acc = opened(real_client)

    def work():
        yield value_of(opened(proxy.url).take_grad(2, timeout=600))

    head = fork(work)
    until(lambda: acc.info().waiting)
    head.signal(end)
    for value in (2, 4):
        acc.apply_grad(np.full(6, value))
    with clock.running():
        # Its lease runs out, and it is passed over.
        assert value_of(acc.take_grad(1, timeout=60)) == 6
    if end == signal.SIGSTOP:
        # It resumes, at the end of the queue.
        head.signal(signal.SIGCONT)
        until(lambda: acc.info().waiting)
        for value in (8, 16):
            acc.apply_grad(np.full(6, value), local_step=1)
        assert head.value() == 24
    info = acc.info()
    assert (info.waiting, info.unacknowledged) == ([], [])


def test_a_taker_whose_connection_breaks_keeps_its_place(proxy, real_client, background, until):
    acc, first = opened(real_client), opened(proxy.url)
    taking = []
    for handle in (first, acc):
        taking.append(background(handle.take_grad, 1, timeout=600))
        until(lambda: len(acc.info().waiting) == len(taking))
    proxy.listen_anew()
    proxy.cut_all()
    until(lambda: "take" in proxy.sent)
    for value, one in enumerate(taking):
        acc.apply_grad(np.full(6, value), local_step=FOREVER)
        assert value_of(one.result(60)) == value
    acc.delete()


class TakenMeanwhile(Apply):
    """Its gradient is in the round that others have taken, or it is stale."""

    def take_round(self):
        self.apply(4)
        self.taken = self.take(self.direct, 1)

    def check(self, scene, outcome):
        if not hasattr(self, "taken"):
            self.take_round()
        self.how = (outcome.value.outcome, self.taken)
        assert self.how in (("applied", 5), ("stale", 4))

    def again(self, scene):
        assert self.direct.num_accumulated() == 0


@pytest.mark.parametrize("name", thorough(["apply in parts", "apply in partitions"], usual=["apply in partitions"]))
def test_a_round_that_is_taken_meanwhile(everywhere, name):
    acted = []

    def make():
        acted.append(TakenMeanwhile(**vars(OPERATIONS[name])))
        return acted[-1]

    everywhere(Suspended(TakenMeanwhile.take_round, 10), make)
    assert {acting.how[0] for acting in acted} == {"applied", "stale"}


class OtherPublisher(Publish):
    """Others publish other values for the same step, and one of the two is told."""

    refused = ""
    value = 9.0

    def do(self, scene):
        try:
            super().do(scene)
        except redisacc.ConflictError:
            return "suspended"
        return ""

    def publish_other(self):
        tree = self.tree(2)
        for leaf in tree.values():
            leaf[leaf != 0] = self.value
        try:
            self.direct.publish(tree, 2)
        except redisacc.ConflictError:
            self.refused = "other"

    def check(self, scene, outcome):
        if not outcome.value and not self.refused:
            self.publish_other()
        self.refused += outcome.value
        assert self.refused in ("other", "suspended")
        step, tree = scene.open_directly(redisacc.Parameters, "w").latest()
        assert step == 2
        assert set(tree["bias"]) == {2.0 if self.refused == "other" else self.value}

    def again(self, scene):
        assert self.direct.step() == 2


class SamePublisher(OtherPublisher):
    """Others publish the same, and nobody is told."""

    value = 2.0

    def publish_other(self):
        self.publish(self.direct, 2)

    def check(self, scene, outcome):
        assert outcome.value == ""
        self.check_version(scene, 2)


class Builder(OtherPublisher):
    """Others build the next version on it, which keeps blobs of it, before its publisher knows."""

    has_built = False

    def publish_other(self):
        if self.direct.latest()[0] == 2:
            table = self.tree(2)["table"]
            table[0] = 5
            self.direct.publish({**self.tree(2), "table": table}, 3, changed={"table": [0], "bias": []})
            self.has_built = True

    def check(self, scene, outcome):
        self.refused = f"{outcome.value} {self.has_built}"
        if not self.has_built:
            self.publish_other()
        step, tree = scene.open_directly(redisacc.Parameters, "w").latest()
        assert (step, tree["bias"].tolist(), tree["table"][:2, 0].tolist()) == (3, [2] * 3, [5, 2])

    def again(self, scene):
        assert self.direct.step() == 3


@pytest.mark.slow(keep="Builder.*partitions")
@pytest.mark.parametrize("name", ["publish", "publish in partitions"])
@pytest.mark.parametrize(
    ("kind", "ways"),
    [(OtherPublisher, {"other", "suspended"}), (SamePublisher, {""}), (Builder, {" False", " True", "suspended True"})],
)
def test_a_version_that_others_publish_meanwhile(everywhere, name, kind, ways):
    acted = []

    def make():
        acted.append(kind(**vars(OPERATIONS[name])))
        return acted[-1]

    everywhere(Suspended(kind.publish_other, 10), make)
    seen = {acting.refused for acting in acted}
    assert seen <= ways
    assert len(seen) > 1 or len(ways) == 1


def test_a_wait_goes_on_when_its_connections_break(proxy, real_client, background, until):
    with redisacc.Parameters("w", redis=real_client) as direct, redisacc.Parameters("w", redis=proxy.url) as through:
        direct.publish(np.zeros(3), 1)
        waiting = background(through.wait, 1, 60)
        for _ in range(3):
            until(lambda: real_client.execute_command("PUBSUB", "SHARDCHANNELS") or real_client.pubsub_channels())
            proxy.cut_all()
        direct.publish(np.ones(3), 2)
        assert waiting.result(60)[0] == 2
        direct.delete()
