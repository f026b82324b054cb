"""A chief that dies anywhere in an update leaves work that its successor finishes, or keys that end."""

import numpy as np
import pytest
from support.command import collect_garbage
from support.selection import ONE_NODE

import redisacc

pytestmark = pytest.mark.every_server

RECORD = "redisacc:{half}:parameters"
WEIGHTS = {"w": np.arange(20_000, dtype=np.float32), "b": np.ones(3, np.float64)}

# Where the chief dies.
PLACES = {
    "before the order": lambda proxy, die: proxy.before("register_version", die),
    "after the order": lambda proxy, die: proxy.after("register_version", die),
    "before the parts": lambda proxy, die: proxy.before("SET", die),
    "before the commit": lambda proxy, die: proxy.before("publish", die),
    "after the commit": lambda proxy, die: proxy.after("publish", die),
}
# Without partitions, an order is not registered.
CASES = [(2, place) for place in PLACES] + [(None, place) for place in [*PLACES][2:]]


@pytest.fixture
def begin(real_client):
    """Begins, or continues, a training with an optimizer."""

    def make(partitions, where=real_client, **options):
        return redisacc.Chief(
            *("half", WEIGHTS),
            optimizer=redisacc.optim.AdamW(0.1, **options),
            workers=1,
            patience=0.3,
            accumulator={"partitions": partitions},
            redis=where,
        )

    return make


@pytest.fixture
def killed(begin, proxy, durations):
    """Lets a chief die in an update: from then on, nothing of it reaches the server."""

    def die():
        proxy.refuses = True
        proxy.cut_all()

    def run(partitions, place, until, **options):
        with durations(opening=1.0, call=1.0, release=0.3), begin(partitions, proxy.where, **options) as chief:
            PLACES[place](proxy, die)
            with pytest.raises(redisacc.ServerUnavailableError):
                update(chief, until)
            proxy.refuses = False

    return run


@pytest.fixture
def work(real_client, background):
    """Starts a worker in a thread."""

    def run():
        with redisacc.Worker("half", redis=real_client) as worker:
            for step, parameters in worker.steps():
                worker.apply({path: values * step for path, values in parameters.items()}, metrics={"loss": step})

    return lambda: background(run)


def update(chief, until):
    for _ in chief.updates(until=until):
        pass
    return {path: values.tobytes() for path, values in chief.latest()[1].items()}


@pytest.mark.slow(keep="valkey-2-")
@pytest.mark.parametrize(("partitions", "place"), CASES)
def test_a_successor_makes_the_same_update(
    begin,
    killed,
    work,
    real_client,
    partitions,
    place,
):
    with begin(partitions) as chief:
        worker = work()
        expected = update(chief, 3)
        worker.result(30)
        chief.delete()
    worker = work()
    killed(partitions, place, until=3)
    with begin(partitions) as chief:
        assert update(chief, 3) == expected
        worker.result(30)
        assert (chief.step, real_client.hget(RECORD, "updates")) == (3, b"3")
        assert [past.step for past in chief.history()] == [0, 1, 2]
        only_what_is_listed(real_client)
        chief.delete()
    assert left(real_client) == []


@pytest.fixture
def at_step_1(begin, work):
    """A training in two partitions without a chief, whose first step is done, and its worker."""
    with begin(2) as chief:
        worker = work()
        for _ in chief.updates():
            break
    return worker


@pytest.mark.slow(keep="valkey")
@pytest.mark.parametrize("place", ["after the order", "before the commit"])
def test_what_nobody_continues_goes_when_its_lease_ends(
    begin,
    killed,
    at_step_1,
    real_server,
    real_client,
    place,
):
    killed(2, place, until=2)
    before = contents_of(real_client)
    # Until then, a successor may use all of it.
    assert collect_garbage(real_server.url) == []
    end_leases(real_client)
    assert [one["why"] for one in collect_garbage(real_server.url)] == ["blobs"]
    only_what_is_listed(real_client)
    assert contents_of(real_client) == before
    # Its successor gets another number, and makes the update again.
    with begin(2) as chief:
        assert chief.step == 1
        update(chief, 2)
        at_step_1.result(30)
        chief.delete()
    assert left(real_client) == []


# In a cluster, gc would need the proxy of each node.
@pytest.mark.servers(*ONE_NODE)
def test_gc_removes_nothing_that_a_chief_takes_up_again_after_a_failover(
    begin,
    killed,
    at_step_1,
    real_client,
    proxy,
):
    before = real_client.hmget(RECORD, "attempts", "registered")
    killed(2, "before the commit", until=2)
    # The leader forgets the registration, as a replica does that lagged behind.
    attempts = f"{RECORD}:attempts"
    new = [member for member in real_client.zrange(attempts, 0, -1) if member.split(b"-")[1] > before[0]]
    assert len(new) == 3
    real_client.zrem(attempts, *new)
    real_client.hset(RECORD, mapping=dict(zip(["attempts", "registered"], before, strict=True)))
    updated = []

    def continue_it():
        with begin(2) as successor:
            updated.append(update(successor, 2))
        at_step_1.result(30)

    proxy.before("UNLINK", continue_it)
    (leftover,) = collect_garbage(proxy.url)
    assert (leftover["why"], len(leftover["keys"])) == ("blob", 6)
    only_what_is_listed(real_client)
    latest = redisacc.Parameters("half", redis=real_client).latest()
    assert {path: values.tobytes() for path, values in latest[1].items()} == updated[0]
    with begin(2) as successor:
        successor.delete()
    assert left(real_client) == []


def test_gc_removes_a_part_whose_number_no_update_can_have(begin, real_server, real_client):
    with begin(2) as chief:
        key = part_key(real_client, f"{'0' * 16}-{10**15 - 1}-flat", 0)
        real_client.set(key, b"foreign")
        assert [one["keys"] for one in collect_garbage(real_server.url)] == [[key]]
        assert not real_client.exists(key)
        # The numbers of updates are not used up by it.
        assert int(real_client.hget(RECORD, "attempts")) < 10
        chief.delete()


def test_another_optimizer_makes_the_update_under_another_name(
    begin,
    killed,
    work,
    real_client,
):
    """The order that its predecessor had registered is given up."""
    worker = work()
    killed(2, "before the commit", until=1)
    abandoned = parts(real_client) - listed(real_client)
    assert len(abandoned) == 3 * 2
    with begin(2, weight_decay=0.5) as chief:
        update(chief, 1)
        worker.result(30)
        end_leases(real_client)
        # The next update sweeps.
        worker = work()
        update(chief, 2)
        worker.result(30)
        assert not abandoned & parts(real_client)
        only_what_is_listed(real_client)
        chief.delete()
    assert left(real_client) == []


def part_key(client, blob, number):
    """Returns the key of a part, which is in one of the partitions that the record lists."""
    text = client.hget(RECORD, "partitions")
    if not text:
        return f"{RECORD}:object:{blob}:{number}"
    partitions = text.decode().split(",")
    return f"redisacc:{{half/{int(partitions[number % len(partitions)]):05}}}:partition:blob:{blob}:{number}"


def parts(client):
    """Returns the keys of all parts of parameters that do not expire."""
    kinds = ("redisacc:{half}:parameters:object:*", "redisacc:{half/*}:partition:blob:*")
    return {key.decode() for kind in kinds for key in client.scan_iter(kind) if client.pttl(key) == -1}


def listed(client):
    """Returns the keys of the parts of the version that is published."""
    fields = client.hmget(RECORD, "full", "slots")
    number = int(fields[1].split(b" ")[0].rsplit(b":", 1)[1])
    blobs = [entry.split(":")[0] for text in fields for entry in text.decode().split(" ")]
    return {part_key(client, blob, part) for blob in blobs for part in range(number)}


def only_what_is_listed(client):
    """Nothing is there for good but the version, and what the list of attempts has for slow readers."""
    waiting = {member.decode().split(" ")[0] for member in client.zrange(f"{RECORD}:attempts", 0, -1)}
    found = {key for key in parts(client) if key.split(":")[-2] not in waiting}
    assert found == listed(client)


def contents_of(client):
    return {key: client.hget(RECORD, key) for key in (b"version", b"full", b"slots", b"step")}


def end_leases(client):
    """Lets the leases of all attempts end, as if much time had passed."""
    for what in (":parameters", ""):
        key = f"redisacc:{{half}}{what}:attempts"
        for member in client.zrange(key, 0, -1):
            client.zadd(key, {member: 1})


def left(client):
    """Returns the keys that do not end by themselves."""
    return [key for key in client.scan_iter() if client.pttl(key) == -1]
