"""Forks at any moment: the child can use what its parent has opened, with every kind of client."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time

import pytest
from support import clients
from support.leaks import remaining
from support.proxy import Fault
from support.selection import thorough

import redisacc

# A step that no round reaches.
LATEST = 10**9
PATIENCE = 60
# TLS and Unix sockets have no locks of their own.
USUAL = ["url", *(name for name, kind in clients.ALL.items() if kind.wire in ("tcp", "sentinel"))]


@pytest.mark.slow
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("kind", thorough(["url", *clients.ALL], usual=USUAL))
def test_children_that_are_forked_while_threads_open_connections_end(fork, real_server, real_client, everything, kind):
    with contextlib.ExitStack() as stack:
        where = real_server.url
        if kind != "url":
            where = stack.enter_context(clients.ALL[kind].connected(real_server.port, socket_timeout=20))
        mine, childs = (
            stack.enter_context(redisacc.ConditionalAccumulator("float32", [2], redis=where)) for _ in range(2)
        )
        # They run only around a fork, because they would break the child's connections as well.
        runs, stop = threading.Event(), threading.Event()
        opened = []

        def break_connections():
            while runs.wait() and not stop.wait(0.001):
                real_client.client_kill_filter(_type="normal", skipme=True)

        def open_connections():
            while runs.wait() and not stop.is_set():
                mine.apply_grad([1.0, 2.0], local_step=LATEST)
                opened.append(None)

        def work():
            sys.setswitchinterval(0.005)
            for _ in range(2):
                childs.apply_grad([1.0, 2.0], local_step=LATEST)
            childs.take_grad(2, timeout=PATIENCE)
            yield childs.num_accumulated()

        threads = [threading.Thread(target=each) for each in (break_connections, open_connections, open_connections)]
        for thread in threads:
            thread.start()
        # A thread pauses anywhere, and so also where it holds a lock.
        sys.setswitchinterval(1e-6)
        chance = random.Random(0)
        try:
            for _ in range(20 if everything else 2):
                before = len(opened)
                runs.set()
                while len(opened) == before and all(thread.is_alive() for thread in threads):
                    time.sleep(0.0005)
                time.sleep(chance.random() * 0.002)
                child = fork(work)
                runs.clear()
                assert child.value() == 0
            assert all(thread.is_alive() for thread in threads)
        finally:
            sys.setswitchinterval(0.005)
            stop.set()
            runs.set()
            for thread in threads:
                thread.join()
    assert remaining(real_client) == []


@pytest.mark.servers("valkey")
def test_a_fork_waits_for_a_thread_that_opens_a_connection(fork, proxy, background):
    """OpenSSL has locks that a child cannot release, and a child would wait for them without a word."""
    proxy.arm(Fault("reply", 0, 0, "hold"))
    opening = background(lambda: redisacc.ConditionalAccumulator("float32", [1], redis=proxy.url).close())
    assert proxy.happened()
    passed = []

    def let_pass():
        # By now, the fork would be over if it did not wait.
        time.sleep(0.2)
        passed.append(None)
        proxy.resume()

    passing = background(let_pass)

    def work():
        yield len(passed)

    assert fork(work).value() == 1
    passing.result()
    opening.result()
