"""Fixtures of the tests of the public API."""

import json
import signal
import threading

import pytest
from click.testing import CliRunner

from redisacc.tools.cli import main


@pytest.fixture
def waiting(until):
    """Waits until this number of takers is in the queue of an accumulator."""

    def wait(acc, number):
        until(lambda: len(acc.info().waiting) == number)

    return wait


@pytest.fixture
def dies(proxy):
    """Interrupts a call through the proxy before its next request of a kind. Nothing of it reaches the server later."""

    def call(name, function, *args, **options):
        is_over, is_cut = threading.Event(), threading.Event()

        def interrupt():
            proxy.refuses = True
            # It waits for the reply. While it connects, an interrupt could leave an open socket.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert is_over.wait(20)
            proxy.cut_all()
            is_cut.set()

        proxy.before(name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            function(*args, **options)
        is_over.set()
        assert is_cut.wait(20)
        proxy.refuses = False

    return call


@pytest.fixture
def gc(real_server):
    """Runs `redisacc doctor --fix`, and returns why it finds what; and how many keys it removes, given "--yes"."""

    def run(*words):
        result = CliRunner().invoke(main, ["doctor", "--fix", "--json", *words, "--redis", real_server.url])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        return [(leftover["name"], leftover["why"]) for leftover in found["leftovers"]], found["removed"]

    return run
