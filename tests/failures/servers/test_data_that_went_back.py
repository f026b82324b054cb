"""A server that comes back with older data: each open handle is told what it must know, once, and no other one is."""

import numpy as np
import pytest
from support.proxy import proxy_before_server

import redisacc

pytestmark = [pytest.mark.servers("valkey", "redis7", "redis62")]


@pytest.fixture
def data(daemon):
    return Crash(daemon)


class Crash:
    """A server without an append-only file is killed: what came after its last snapshot is lost."""

    def __init__(self, daemon):
        self.server = daemon("--appendonly", "no").start()

    def keep(self):
        with self.server.client() as client:
            client.save()

    def go_back(self):
        self.server.kill()
        self.server.start()


def end_cleanly(server):
    with server.client() as client:
        client.shutdown(save=True)
    server._process.wait(10)


@pytest.fixture
def open_acc(data, open_accumulator):
    def make(**options):
        options = {"reduction_type": "SUM", "redis": data.server.url, **options}
        return open_accumulator("dense", "int32", [2], "w", **options)

    return make


def apply(acc, value, step=0):
    return acc.apply_grad(np.full(2, value, np.int32), local_step=step)


def taken(acc):
    """Takes a round of one gradient and returns the sum."""
    return int(acc.take_grad(1, timeout=20)[0])


def told(acc, match):
    """Checks that a take raises, and that its round is still there. Returns the sum."""
    with pytest.raises(redisacc.DataLossError, match=match):
        taken(acc)
    with acc.recover() as found:
        return int(found.gradient[0])


def losses(data):
    with data.server.client() as client:
        return client.hget("redisacc:{w}", "losses")


def begun(data, open_acc, number=2):
    """Returns handles. The second has taken a round since the data were kept; the first applied its gradient."""
    handles = [open_acc() for _ in range(number)]
    apply(handles[0], 1)
    data.keep()
    assert taken(handles[1]) == 1
    return handles


# How a handle has noticed: by what it knew itself, or by what another one has noted.
OWN = "no longer knows a request of this handle|had granted"
OTHER = "has gone back to older data, as another handle has noticed"
ANY = f"{OWN}|{OTHER}"


def test_takers_that_know_of_nothing_later_are_told_once_another_one_has_noticed(data, open_acc):
    worker, busy, idle, new = (open_acc() for _ in range(4))
    apply(worker, 1)
    assert taken(idle) == 1
    apply(worker, 2, step=1)
    data.keep()
    assert taken(busy) == 2
    data.go_back()
    # The taker whose round was undone notices, gets no gradient for the second time, and notes it for the others.
    assert told(busy, OWN) == 2
    assert losses(data) == b"1"
    for step, taker in enumerate((idle, new), 2):
        apply(worker, 4, step=step)
        assert told(taker, OTHER) == 4
    # Each is told once, and a handle that was opened later has nothing to be told.
    for step, taker in enumerate((idle, busy, new, open_acc()), 4):
        apply(worker, step, step=step)
        assert taken(taker) == step
    assert losses(data) == b"1"


def test_a_loss_by_which_the_note_of_an_earlier_one_is_lost(data, open_acc):
    worker, busy, idle = begun(data, open_acc, 3)
    data.go_back()
    assert told(busy, OWN) == 1
    apply(worker, 2, step=1)
    assert told(idle, OTHER) == 2
    data.go_back()
    assert losses(data) is None
    # Both know of more rounds, and of the note.
    assert told(idle, OWN) == 1
    assert losses(data) == b"2"
    apply(open_acc(), 4, step=1)
    assert told(busy, ANY) == 4
    assert losses(data) == b"2"


def test_a_taker_knows_of_the_rounds_before_it_was_opened(data, open_acc):
    begun(data, open_acc)
    idle = open_acc()
    data.go_back()
    assert told(idle, "had granted 1 rounds, but knows only of 0") == 1


def test_a_taker_knows_of_the_rounds_that_others_are_granted_while_it_waits(data, open_acc, background, until):
    *_, waiting = begun(data, open_acc, 3)
    take = background(taken, waiting)
    until(lambda: waiting._taker.history.takes == 1)
    data.go_back()
    with pytest.raises(redisacc.DataLossError, match="had granted 1 rounds, but knows only of 0"):
        take.result(60)
    # It did not wait behind the place that it had in the queue.
    with waiting.recover() as found:
        assert found.gradient.tolist() == [1, 1]


def test_a_taker_that_waits_gives_up_its_place_once_another_one_has_noticed(data, open_acc, background, until):
    """Otherwise it would wait behind itself until the lease of that place ends."""
    _worker, busy, waiting = begun(data, open_acc, 3)
    data.go_back()
    take = background(waiting.take_grad, 2, timeout=60)
    with data.server.client() as client:
        until(lambda: client.zcard("redisacc:{w}:queue"))
        (place,) = client.zrange("redisacc:{w}:queue", 0, -1)
        # It notices in its first poll, although it gets no round.
        with pytest.raises(redisacc.TakeTimeoutError):
            busy.take_grad(2, timeout=0)
        until(lambda: waiting._taker.history.losses == 1)
        assert client.zscore("redisacc:{w}:queue", place) is None
        assert not client.hexists("redisacc:{w}:takers", place)
    apply(open_acc(), 2)
    with pytest.raises(redisacc.DataLossError, match=OTHER):
        take.result(60)


def test_a_round_that_another_one_has_taken_again_is_noticed(data, open_acc):
    """By the time that its first taker asks, the number of rounds has grown again."""
    worker, chief = open_acc(), open_acc()
    apply(worker, 1)
    assert taken(chief) == 1
    apply(worker, 2, step=1)
    data.keep()
    assert taken(chief) == 2
    data.go_back()
    assert taken(open_acc()) == 2
    fresh = open_acc()
    apply(fresh, 4, step=2)
    assert told(chief, "no longer knows a request of this handle") == 4
    apply(fresh, 8, step=3)
    assert taken(chief) == 8


def test_a_block_whose_round_was_undone(data, open_acc):
    worker, busy = open_acc(), open_acc()
    apply(worker, 1)
    data.keep()
    block = busy.take(1, timeout=20)
    block.__enter__()
    data.go_back()
    with pytest.raises(redisacc.DataLossError, match="no longer lists the round of step 0"):
        block.__exit__(None, None, None)
    assert told(busy, OWN) == 1


def test_gradients_that_are_lost_are_told_to_their_worker(data, open_acc):
    """A taker is not told: its worker decides whether to apply it again."""
    worker, idle, taker = (open_acc() for _ in range(3))
    apply(idle, 1)
    data.keep()
    apply(worker, 2)
    data.go_back()
    with pytest.raises(redisacc.DataLossError, match="older data"):
        apply(worker, 4)
    assert apply(worker, 8)
    assert apply(idle, 16)
    assert taken(taker) == 1 + 8 + 16
    assert losses(data) is None


def test_a_gradient_that_comes_back_is_no_loss_to_its_worker(data, open_acc):
    """It is counted again, and the takers are told."""
    worker, busy = begun(data, open_acc)
    data.go_back()
    assert apply(worker, 2)
    assert told(busy, OWN) == 3


def test_readers_and_publishers_of_parameters(data):
    where = data.server.url
    with (
        redisacc.Parameters("p", redis=where, publisher="chief") as publisher,
        redisacc.Parameters("p", redis=where) as reader,
        redisacc.Parameters("p", redis=where) as idle,
    ):
        for step in (1, 2, 3):
            publisher.publish({"w": np.full(3, step)}, step)
            if step == 1:
                assert idle.latest()[0] == 1
                data.keep()
        assert reader.latest()[0] == 3
        data.go_back()
        # The step tells them, and a wait lasts until there is a later one.
        assert reader.latest()[0] == reader.step() == 1
        with pytest.raises(redisacc.WaitTimeoutError, match="step 1 is the last that was published"):
            reader.wait(after=3, timeout=0.1)
        # The publisher may publish what is lost again, or go on; a difference to what is lost is not used.
        publisher.publish({"w": np.array([4, 3, 3])}, 4, changed={"w": [0]})
        for one in (reader, idle):
            step, tree = one.wait(after=3, timeout=20)
            assert (step, tree["w"].tolist()) == (4, [4, 3, 3])


# No false alarms


def test_a_restart_with_all_data_tells_nobody(data, open_acc):
    worker, one, other = (open_acc() for _ in range(3))
    for step, taker in enumerate((one, other)):
        apply(worker, 1, step=step)
        assert taken(taker) == 1
    apply(worker, 2, step=2)
    end_cleanly(data.server)
    data.server.start()
    assert taken(other) == 2
    apply(worker, 4, step=3)
    assert taken(one) == 4
    assert losses(data) is None


def test_a_lower_step_tells_nobody(data, open_acc):
    worker, one, other = (open_acc() for _ in range(3))
    for step, taker in enumerate((one, other)):
        apply(worker, 1, step=step)
        assert taken(taker) == 1
    worker.set_global_step(-5)
    for step, taker in enumerate((one, other), -5):
        apply(worker, 2, step=step)
        assert taken(taker) == 2


def test_a_take_that_is_sent_twice_notes_a_loss_once(data, open_acc):
    with proxy_before_server(data.server.url) as proxy:
        worker, busy = open_acc(), open_acc(redis=proxy.url)
        apply(worker, 1)
        data.keep()
        assert taken(busy) == 1
        data.go_back()
        # The reply is lost.
        proxy.after("take", proxy.cut_all)
        assert told(busy, ANY) == 1
        assert proxy.sent.count("take") > 2
    assert losses(data) == b"1"
