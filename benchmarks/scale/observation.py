"""Counts what a real training with an optimizer sends to each server in a step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import redisacc

# What servers count besides the commands of a step: the commands that count, and the cluster's own.
_NOT_COUNTED = ("config", "info", "client", "cluster", "command", "hello", "pubsub", "ping", "script", "asking")
NAME = "scale"
# Seconds until the servers have done what follows a step.
SETTLE = 0.02
# Seconds that reducers have to come.
PATIENCE = 10.0


def observe(
    connect: Callable[[], Any], servers: Sequence[Any], *, workers: int, partitions: int, nbytes: int, steps: int = 8
) -> list[Counter[str]]:
    """Trains for some steps, and returns what each server executes in a step.

    Workers begin a step together, when everything that belongs to the one before is done. Whatever depends on the
    clock, such as leases, is left out, because each count is the least of several steps.

    Args:
        connect: returns a new client of the server, or of the cluster: each process of a training has its own.
        servers: a client of each server.
        workers: number of workers.
        partitions: number of partitions; 1: none.
        nbytes: bytes of the model, at least 512 KiB.
        steps: number of steps that are counted.

    Returns:
        For each server, the calls of each command, and as "connections" how many clients it has.
    """
    model = {"weights": np.zeros(nbytes // 4, np.float32)}
    last = steps + 3
    begin = threading.Barrier(workers + 1)
    found: list[list[Counter[str]]] = []

    def work(number: int) -> None:
        gradient = {"weights": np.ones(nbytes // 4, np.float32)}
        with redisacc.Worker(NAME, number=number, redis=connect()) as worker:
            for _ in worker.steps():
                begin.wait()
                # The chief begins to wait for the round.
                time.sleep(SETTLE)
                worker.apply(gradient)

    with contextlib.ExitStack() as stack:
        _start_reducers(connect, servers, stack)
        chief = stack.enter_context(
            redisacc.Chief(
                NAME,
                model,
                workers=workers,
                optimizer=redisacc.optim.SGD(0.1),
                accumulator={"partitions": partitions},
                redis=connect(),
            )
        )
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
        for thread in threads:
            thread.start()
        begin.wait()
        before: list[Counter[str]] = []
        connections: list[int] = []
        for step in chief.updates(until=last):
            if step == last:
                continue
            time.sleep(SETTLE)
            if step == 1:
                _wait_for_reducers(chief)
            now = [_executed(server) for server in servers]
            if before:
                found.append([after - earlier for after, earlier in zip(now, before, strict=True)])
            before = [_executed(server) for server in servers]
            connections = [len(server.client_list()) for server in servers]
            begin.wait()
        for thread in threads:
            thread.join()
        chief.delete()
    least = [_least([of_step[place] for of_step in found[-steps:]]) for place in range(len(servers))]
    return [counts + Counter(connections=number) for counts, number in zip(least, connections, strict=True)]


def _start_reducers(connect: Callable[[], Any], servers: Sequence[Any], stack: contextlib.ExitStack) -> None:
    nodes: list[str | None] = [None]
    if len(servers) > 1:
        nodes = ["{host}:{port}".format(**server.connection_pool.connection_kwargs) for server in servers]
    for node in nodes:
        reducer = redisacc.Reducer(NAME, redis=connect(), node=node)
        thread = threading.Thread(target=reducer.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(reducer.close)


def _wait_for_reducers(chief: redisacc.Chief) -> None:
    """Waits until each part of the gradients has a reducer; without one, the chief fetches the parts itself."""
    gradients = chief._accumulator
    give_up = time.monotonic() + PATIENCE
    while not all(gradients._transport.call("EXISTS", key) for key in gradients._keys.reducers):
        if time.monotonic() > give_up:
            raise TimeoutError(f"no reducer has come within {PATIENCE:.0f} s")
        time.sleep(SETTLE)


def _executed(server: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, of in server.info("commandstats").items():
        command = name.removeprefix("cmdstat_").partition("|")[0]
        if command not in _NOT_COUNTED:
            found[command] += of["calls"]
    return found


def _least(counts: Sequence[Counter[str]]) -> Counter[str]:
    least = counts[0]
    for count in counts[1:]:
        least &= count
    return least
