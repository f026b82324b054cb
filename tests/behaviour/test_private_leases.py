"""Private accumulators: no other process shares them, and they are removed however their owner ends."""

import gc
import subprocess
import sys

import pytest

import redisacc

# How long a private accumulator outlives its owner, in seconds.
LEASE = 60.0


def test_garbage_collection_removes_a_private_accumulator(client, until):
    acc = redisacc.ConditionalAccumulator("float32", [1], redis=client)
    acc.apply_grad([1.0])
    assert client.keys()
    del acc
    gc.collect()
    until(lambda: client.keys() == [])


KILLED = """
import os, signal, sys
import numpy as np
import redisacc
for limit in (0, 10**9):
    acc = redisacc.ConditionalAccumulator("float32", [500], redis=sys.argv[1], limits=redisacc.Limits(in_place=limit))
    acc.apply_grad(np.ones(500, np.float32))
    held = acc.take(1)
    held.__enter__()
    acc.apply_grad(np.ones(500, np.float32), local_step=1)
    sparse = redisacc.SparseConditionalAccumulator("float32", redis=sys.argv[1], limits=redisacc.Limits(in_place=limit))
    sparse.apply_grad([5], [1.0])
    globals()[f"kept{limit}"] = acc, held, sparse
if sys.argv[2] == "kill":
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_owner_leaves_nothing_after_its_lease(clock, real_server, real_client):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, real_server.url, "kill"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        assert len(real_client.keys()) >= 8
    finally:
        process.kill()
        process.communicate()
    clock.advance(LEASE - 20)
    assert len(real_client.keys()) >= 8
    clock.advance(20.0)
    assert real_client.keys() == []


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_a_process_that_ends_takes_its_private_accumulators_along(real_server, real_client):
    subprocess.run([sys.executable, "-c", KILLED, real_server.url, "exit"], check=True, timeout=30)
    assert real_client.keys() == []


@pytest.mark.thorough
@pytest.mark.servers("valkey")
def test_a_process_that_ends_after_its_server_does_not_wait_for_it(daemon):
    """Its lease removes it, if the server comes back at all."""
    server = daemon().start()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED + "print(flush=True)\nsys.stdin.read()", server.url, "exit"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"\n"
        server.kill()
        # Four accumulators, not four times as long as a call tries to reach a server.
        process.communicate(timeout=25)
    finally:
        process.kill()
        process.communicate()


def test_an_iterator_over_events_keeps_a_private_accumulator(client):
    acc = redisacc.ConditionalAccumulator("float32", [1], redis=client)
    record = acc.accumulator_ref
    events = acc.events(timeout=5)
    del acc
    gc.collect()
    assert client.exists(record)
    del events
    gc.collect()
    assert not client.exists(record)
