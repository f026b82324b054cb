"""Runs random sequences of operations on a machine, which compares the library with a model after each of them.

A sequence follows from its number, and each of its operations from a seed, so a sequence that fails is shortened by
leaving operations out.
"""

import contextlib
import random
import time
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest

from support.driven import DrivenClient
from support.leaks import leftovers

# How long a sequence that fails is shortened, in seconds.
SHORTENING = 60.0
ERRORS = (Exception, pytest.fail.Exception)


class Machine:
    """The operations are methods, and draw what they do from ``draw``, and arrays from ``rng``."""

    # How often each operation comes.
    OPERATIONS: ClassVar[Mapping[str, int]]
    draw: random.Random
    rng: np.random.Generator

    def __init__(self, server, clock, driven):
        # The servers' own tests begin with an empty database, and so does every sequence.
        self.server, self.clock = server, clock
        self.clients = [server.client(), server.client()]
        self.clients[0].flushall()
        # The last one opens handles of redisacc.asyncio, where there is a server for them.
        self.clients.append(driven or self.clients[0])

    def begin(self):
        """Opens what every sequence begins with."""

    def check(self):
        """Checks what holds after each operation."""

    def end(self):
        """Closes everything."""
        assert leftovers(self.clients[0]) == []
        self.server.close()

    def open_at(self, client, kind, *arguments, **options):
        """Opens a handle with one of the clients."""
        where = self.clients[client]
        if isinstance(where, DrivenClient):
            return where.open(kind, *arguments, redis=where, **options)
        return kind(*arguments, redis=where, **options)

    def happens(self, probability):
        """Draws whether something happens."""
        return self.draw.random() < probability


def run(
    kind,
    request,
    number,
    length=25,
):
    """Runs sequences of operations: the same ones each time, or others and many more of them with --long.

    Raises:
        Exception: that of the first sequence that fails, with a note about the shortest that does.
    """
    server, clock = request.getfixturevalue("server"), request.getfixturevalue("clock")
    driven = DrivenClient(server.client()) if server.real else None
    first = 0
    if request.config.getoption("--long"):
        first, number = random.randrange(10**9), 100 * number
    elif request.getfixturevalue("everything"):
        number *= 3
    elif not server.real:
        number //= 10

    def make():
        return kind(server, clock, driven)

    try:
        for each in range(first, first + number):
            draw = random.Random(each)
            names = draw.choices(list(kind.OPERATIONS), list(kind.OPERATIONS.values()), k=length)
            plan = [(name, draw.getrandbits(32)) for name in ("begin", *names)]
            try:
                _run(make(), plan)
            except ERRORS as error:
                error.add_note(f"sequence {each}; it is enough to run {_shortened(make, plan)}")
                raise
    finally:
        if driven:
            driven.close()


def _run(machine, plan):
    try:
        for name, seed in plan:
            machine.draw, machine.rng = random.Random(seed), np.random.default_rng(seed)
            getattr(machine, name)()
            machine.check()
    except ERRORS:
        with contextlib.suppress(*ERRORS):
            machine.end()
        raise
    machine.end()


def _shortened(make, plan):
    give_up = time.monotonic() + SHORTENING
    for place in range(len(plan) - 1, 0, -1):
        shorter = plan[:place] + plan[place + 1 :]
        if time.monotonic() < give_up and _fails(make, shorter):
            plan = shorter
    return plan


def _fails(make, plan):
    try:
        _run(make(), plan)
    except ERRORS:
        return True
    return False
