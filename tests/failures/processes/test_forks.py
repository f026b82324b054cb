"""A fork while another thread opens a connection."""

import time

import pytest
from support.proxy import Fault

import redisacc


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
