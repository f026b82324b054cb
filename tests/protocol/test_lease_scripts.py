"""Each reply of the scripts of leases, and what they leave."""

from __future__ import annotations

import pytest
import redis

import redisacc
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._protocol.scripts.crews import CrewScripts, HeldByOther
from redisacc._protocol.scripts.parameters import ParameterScripts
from redisacc._protocol.scripts.reducers import ReducerScripts
from redisacc._redis.connect import connect

KEYS = Keys("w")
CREW = KEYS.crew

pytestmark = pytest.mark.forges


@pytest.fixture
def scripts(client: redis.Redis) -> CrewScripts:
    return CrewScripts(connect(client), KEYS)


def hold(
    scripts: CrewScripts, holder: str = "a", place: str = "chief", ms: int = 5000, dead: str = "", **options: bool
) -> HeldByOther | None:
    return scripts.hold_lease(
        place=place, holder=holder, process=f"p{holder}", who=f"host {holder}", lease_ms=ms, dead=dead, **options
    )


def test_a_lease_is_taken_extended_and_given_back(scripts: CrewScripts, client: redis.Redis) -> None:
    assert hold(scripts) is None
    first = client.hget(CREW, "chief")
    assert first.startswith(b"a ")
    assert first.endswith(b" pa host a")
    assert 3_590_000 < client.pttl(CREW) <= 3_600_000
    client.pexpire(CREW, 1000)
    assert hold(scripts, ms=6000) is None
    assert int(client.hget(CREW, "chief").split()[1]) >= int(first.split()[1]) + 1000
    assert client.pttl(CREW) > 1000
    assert scripts.release_lease(place="chief", holder="a", process="pa")
    assert not client.exists(CREW)


def test_a_lease_goes_with_the_claim_of_its_process(scripts: CrewScripts, client: redis.Redis) -> None:
    claims = ParameterKeys("w").claims
    for process, left in (("pb", [b"worker 0"]), ("pa", [])):
        hold(scripts, "a", "worker 0")
        ParameterScripts(connect(client), ParameterKeys("w")).claim(
            place="worker 0", incarnation="ab", step=3, process=process
        )
        assert scripts.release_lease(place="worker 0", holder="a", process="pa")
        assert client.hkeys(claims) == left
        # If the server has lost the lease, there may be a claim only.
        assert not scripts.release_lease(place="worker 0", holder="a", process=process)
        assert not client.exists(claims)


def test_a_lease_that_somebody_holds_is_not_given(scripts: CrewScripts, client: redis.Redis) -> None:
    hold(scripts)
    before = client.hgetall(CREW)
    other = hold(scripts, "b")
    assert other is not None
    assert 0 < other.left <= 5
    assert (other.process, other.who) == ("pa", "host a")
    assert not scripts.release_lease(place="chief", holder="b", process="pb")
    assert client.hgetall(CREW) == before
    # Every place has a lease of its own.
    assert hold(scripts, "b", "worker 0") is None
    assert not scripts.release_lease(place="worker 1", holder="b", process="pb")


def test_a_lease_that_has_run_out_is_given_to_the_next(scripts: CrewScripts, client: redis.Redis) -> None:
    client.hset(CREW, "chief", "a 1 pa host a")
    # Whoever had it may extend it, as long as nobody else has it.
    assert hold(scripts, "a") is None
    client.hset(CREW, "chief", "a 1 pa host a")
    assert hold(scripts, "b") is None
    assert client.hget(CREW, "chief").startswith(b"b ")
    assert hold(scripts, "a") is not None


def test_a_lease_is_not_extended_after_it_was_deleted_with_the_accumulator(
    scripts: CrewScripts, client: redis.Redis
) -> None:
    # A worker that waits for its chief holds one before there is an accumulator.
    assert hold(scripts) is None
    assert hold(scripts, renews=True) is None
    client.delete(CREW)
    with pytest.raises(redisacc.NotFoundError, match="'w' was deleted, and its leases with it"):
        hold(scripts, renews=True)
    assert client.keys() == []
    # Only the lease was lost, as with a server that comes back with older data.
    client.hset(KEYS.record, "format", "1")
    assert hold(scripts, renews=True) is None
    assert client.hget(CREW, "chief").startswith(b"a ")


def test_the_lease_of_a_dead_process_is_given_to_the_next(scripts: CrewScripts, client: redis.Redis) -> None:
    hold(scripts, "a")
    assert hold(scripts, "b", dead="host") is not None
    assert hold(scripts, "b", dead="pa") is None
    # Also if it is sent again. A lease that another process has taken meanwhile is not the dead one's.
    assert hold(scripts, "b", dead="pa") is None
    assert client.hget(CREW, "chief").endswith(b" pb host b")
    assert hold(scripts, "c", dead="pa") is not None


@pytest.mark.parametrize(
    "entry", ["", "x", "x y", "x 1 z", "x y p z", "x -1 p z", "x 1.5 p z", "x 99999999999999999999 p z"]
)
def test_an_entry_that_nobody_wrote(scripts: CrewScripts, client: redis.Redis, entry: str) -> None:
    client.hset(CREW, "chief", entry)
    with pytest.raises(redisacc.CorruptDataError, match=r"redisacc:\{w\}:crew: "):
        hold(scripts)
    assert client.hgetall(CREW) == {b"chief": entry.encode()}
    assert not scripts.release_lease(place="chief", holder="a", process="pa")


def test_a_long_name_is_cut(scripts: CrewScripts, client: redis.Redis) -> None:
    client.hset(CREW, "chief", "a 999999999999999 p " + "x" * 100_000)
    other = hold(scripts, "b")
    assert other is not None
    assert len(other.who) == 200


@pytest.mark.parametrize("incarnation", ["", "another"])
def test_finishing_what_is_gone(client: redis.Redis, incarnation: str) -> None:
    scripts = ParameterScripts(connect(client), redisacc.Parameters("w", redis=client)._keys)
    if incarnation:
        client.hset(f"{KEYS.record}:parameters", "incarnation", incarnation)
    before = client.hgetall(f"{KEYS.record}:parameters")
    with pytest.raises(redisacc.NotFoundError, match="published again" if incarnation else "no parameters"):
        scripts.amend(incarnation="mine", event="finished", fields=["finished", "1"])
    assert client.hgetall(f"{KEYS.record}:parameters") == before


@pytest.mark.parametrize("value", ["", "0", "yes", "11", "x" * 10_000])
def test_only_one_means_finished(client: redis.Redis, value: str) -> None:
    with redisacc.Parameters("w", redis=client) as parameters:
        parameters.publish([1.0], 0)
        client.hset(f"{KEYS.record}:parameters", "finished", value)
        assert not parameters.finished()
        parameters.finish()
        assert parameters.finished()
        parameters.finish(False)
        assert not parameters.finished()
        parameters.delete()


@pytest.fixture
def reducer_scripts(client: redis.Redis) -> ReducerScripts:
    return ReducerScripts(connect(client), KEYS, None)


def hold_reducer(scripts: ReducerScripts, holder: str, stored: int = 0, late: int = 0, ms: int = 5000) -> str | None:
    return scripts.hold_reducer(holder=holder, who=f"host {holder}", stored=stored, late=late, sums="", lease_ms=ms)


def test_the_lease_of_a_reducer_is_taken_extended_and_given_back(
    reducer_scripts: ReducerScripts, client: redis.Redis
) -> None:
    assert hold_reducer(reducer_scripts, "a") is None
    first = client.hgetall(KEYS.reducer(None))
    assert first.keys() == {b"holder", b"who", b"since_ms", b"stored", b"late", b"sums"}
    client.hset(KEYS.reducer(None), "since_ms", "1")
    client.pexpire(KEYS.reducer(None), 1000)
    # A number that Lua itself would write as 1e+13.
    assert hold_reducer(reducer_scripts, "a", stored=10**13, late=7) is None
    assert client.pttl(KEYS.reducer(None)) > 1000
    assert client.hgetall(KEYS.reducer(None)) == {
        b"holder": b"a", b"who": b"host a", b"since_ms": b"1", b"stored": b"10000000000000", b"late": b"7",
        b"sums": b"",
    }  # fmt: skip
    assert reducer_scripts.release_reducer(holder="a")
    assert not client.exists(KEYS.reducer(None))
    assert not reducer_scripts.release_reducer(holder="a")


def test_the_lease_of_another_reducer_is_left_alone(reducer_scripts: ReducerScripts, client: redis.Redis) -> None:
    hold_reducer(reducer_scripts, "a", stored=3, late=1)
    client.pexpire(KEYS.reducer(None), 1000)
    before = client.hgetall(KEYS.reducer(None))
    assert hold_reducer(reducer_scripts, "b", stored=9, late=9) == "host a"
    assert not reducer_scripts.release_reducer(holder="b")
    assert client.hgetall(KEYS.reducer(None)) == before
    assert client.pttl(KEYS.reducer(None)) <= 1000
    # Once it has expired, the next reducer gets it, and begins to count.
    client.delete(KEYS.reducer(None))
    assert hold_reducer(reducer_scripts, "b") is None
    assert client.hmget(KEYS.reducer(None), "holder", "stored", "late") == [b"b", b"0", b"0"]


def test_the_name_of_another_reducer_is_printable_and_cut(reducer_scripts: ReducerScripts, client: redis.Redis) -> None:
    client.hset(KEYS.reducer(None), mapping={"holder": "a", "who": "\x1b[2J" + "x" * 100_000})
    other = hold_reducer(reducer_scripts, "b")
    assert other is not None
    assert other.startswith("\\x1b[2Jxxx")
    assert len(other) < 210
    client.hdel(KEYS.reducer(None), "who")
    assert hold_reducer(reducer_scripts, "b") == ""


def test_a_lease_of_a_reducer_without_a_holder_is_replaced(
    reducer_scripts: ReducerScripts, client: redis.Redis
) -> None:
    client.hset(KEYS.reducer(None), mapping={"who": "nobody", "other": "field"})
    assert not reducer_scripts.release_reducer(holder="a")
    assert hold_reducer(reducer_scripts, "a") is None
    assert client.hget(KEYS.reducer(None), "who") == b"host a"
    assert not client.hexists(KEYS.reducer(None), "other")
    assert 0 < client.pttl(KEYS.reducer(None)) <= 5000


def test_what_is_no_lease_of_a_reducer_is_an_error(reducer_scripts: ReducerScripts, client: redis.Redis) -> None:
    client.set(KEYS.reducer(None), "text")
    with pytest.raises(redisacc.RedisAccError, match="WRONGTYPE"):
        hold_reducer(reducer_scripts, "a")
    with pytest.raises(redisacc.RedisAccError, match="WRONGTYPE"):
        reducer_scripts.release_reducer(holder="a")
    assert client.get(KEYS.reducer(None)) == b"text"
