"""A chief does not wait for the take of a predecessor that died in the queue."""

import numpy as np
import pytest

import redisacc

QUEUE, TAKERS = "redisacc:{train}:queue", "redisacc:{train}:takers"


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("optimizer", [None, redisacc.optim.SGD(0.1)], ids=["rounds", "updates"])
def test_the_take_of_a_chief_that_died_is_removed(training, client, until, background, optimizer):
    parameters = {"w": np.zeros(2, np.float32)}
    first = training.chief(parameters, optimizer=optimizer)
    loop = first.updates(until=2) if optimizer else first.rounds(until=2)
    waiting = background(lambda: next(loop))
    until(lambda: client.zcard(QUEUE) == 1)
    # The process ends without a word: nobody renews its take, and its lease of the chief is over.
    (token,) = client.zrange(QUEUE, 0, -1)
    first._accumulator._lifetime.close()
    with pytest.raises(redisacc.CancelledError):
        waiting.result(20)
    seconds, micros = client.time()
    client.zadd(QUEUE, {token: 1})
    client.hset(TAKERS, token, f"1 {seconds * 1000 + micros // 1000 + 600_000} dead:1")
    first.close()
    training.work(gradient=lambda number, step, parameters: {"w": np.ones(2, np.float32)})
    second = training.chief(parameters, optimizer=optimizer)
    assert client.zcard(QUEUE) == client.hlen(TAKERS) == 0
    if optimizer:
        assert next(second.updates(until=1)) == 1
    else:
        assert next(second.rounds(until=1)).num_accumulated == 1
