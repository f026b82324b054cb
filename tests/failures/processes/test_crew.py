"""Many real processes on one accumulator: each accepted gradient is in exactly one round."""

import functools
from collections import Counter

import numpy as np
import pytest
from support.leaks import remaining

import redisacc

APPLIERS = 8
REQUIRED = (7, 16)


def content(gradient):
    """Returns the row of each index."""
    return dict(zip(gradient.indices.tolist(), gradient.values.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.servers("valkey", "redis62")
@pytest.mark.every_server(storage="in_place")
def test_every_accepted_gradient_is_in_exactly_one_round(fork, real_client, open_sparse_stored, everything, tmp_path):
    stop = tmp_path / "stop"

    def opened(worker):
        return open_sparse_stored("float64", [None, 4], "crew", reduction_type="SUM", worker=worker)

    def apply(acc, number):
        step, results = 0, []
        for index in range(number * 1_000_000, number * 1_000_000 + (1000 if everything else 200)):
            result = acc.apply_grad([index], np.full((1, 4), index + 0.5), local_step=step)
            # The step may have moved on by the time of the next gradient.
            step = result.global_step
            results.append((index, result.outcome, step, result.num_accumulated))
        yield results

    def take(acc, required):
        rounds = []
        while True:
            try:
                with acc.take(required, timeout=0.3) as taken:
                    assert taken.num_accumulated >= required
                    rounds.append((taken.global_step, taken.workers, content(taken.gradient)))
            except redisacc.TakeTimeoutError:
                if stop.exists():
                    break
        yield rounds

    takers = [fork(functools.partial(take, opened("taker"), required)) for required in REQUIRED]
    appliers = [fork(functools.partial(apply, opened(f"w{number}"), number)) for number in range(APPLIERS)]
    told = {f"w{number}": applier.value() for number, applier in enumerate(appliers)}
    stop.touch()
    by_taker = [taker.value() for taker in takers]
    assert all(by_taker)
    rounds = sorted((one for of_one in by_taker for one in of_one), key=lambda one: one[0])
    acc = opened("rest")
    if acc.num_accumulated():
        with acc.take(1, timeout=0) as taken:
            rounds.append((taken.global_step, taken.workers, content(taken.gradient)))
    assert [step for step, *_ in rounds] == list(range(len(rounds)))
    # Each gradient is in the round that the reply to its worker named, and each reply named its own place.
    promised = [
        (step, who, index, place)
        for who, results in told.items()
        for index, how, step, place in results
        if how == "applied"
    ]
    for step, workers, rows in rounds:
        of_step = [one for one in promised if one[0] == step]
        assert rows == {index: [index + 0.5] * 4 for _, _, index, _ in of_step}
        assert sorted(place for *_, place in of_step) == list(range(1, len(of_step) + 1))
        assert workers == Counter(who for _, who, _, _ in of_step)
    assert sum(len(rows) for *_, rows in rounds) == len(promised)
    info = acc.info()
    assert (info.applied, info.applied + info.stale) == (len(promised), sum(map(len, told.values())))
    assert (info.takes, info.global_step, info.duplicates) == (len(rounds), len(rounds), 0)
    assert (info.waiting, info.unacknowledged) == ([], [])
    acc.delete()
    assert remaining(real_client) == []
