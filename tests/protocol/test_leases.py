"""What leases leave on the server: in the table of a training's crew, and in the key of a reducer."""

import numpy as np
import pytest

import redisacc

CREW = "redisacc:{w}:crew"
CLAIMS = "redisacc:{w}:parameters:claims"
REDUCER = "redisacc:{w}:reducer"
LARGE = 150_000


@pytest.mark.forges
def test_a_lease_is_taken_extended_and_given_back_with_the_claim_of_its_process(client, clock):
    claims = {"worker 0": "other.1.1", "worker 1": None}
    with redisacc.Worker("w", redis=client), redisacc.Worker("w", redis=client):
        _, end, process, _ = client.hget(CREW, "worker 1").split(b" ", 3)
        claims["worker 1"] = process.decode()
        assert client.hget(CREW, "worker 0").split(b" ")[2] == process
        for place, of in claims.items():
            client.hset(CLAIMS, place, f"3 ab 1795242299846 {of}")
        clock.advance(30)
        assert int(client.hget(CREW, "worker 1").split(b" ")[1]) >= int(end) + 25_000
        assert 3_500_000 < client.pttl(CREW) <= 3_600_000
    assert not client.exists(CREW)
    assert client.hkeys(CLAIMS) == [b"worker 0"]


@pytest.mark.servers("valkey")
def test_the_lease_of_a_reducer(real_server, real_client, background, until):
    acc = redisacc.ConditionalAccumulator("float32", [LARGE], "w", redis=real_client)
    with redisacc.Reducer("w", redis=real_server.url) as reducer:
        run = background(reducer.run)
        take = background(acc.take_grad, 2)
        until(lambda: acc.info().waiting)
        acc.apply_grad(np.ones(LARGE, np.float32))
        until(lambda: acc.info().reducer)
        lease = real_client.hgetall(REDUCER)
        assert lease.keys() == {b"holder", b"who", b"stored", b"late"}
        assert 0 < real_client.pttl(REDUCER) <= 3000
        acc.apply_grad(np.ones(LARGE, np.float32))
        take.result()
        reducer.close()
        run.result()
    assert not real_client.exists(REDUCER)
