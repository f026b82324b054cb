"""Plays operations."""

import itertools
import threading
import zlib

import pytest
from click.testing import CliRunner
from faults import CLUSTER_CLIENTS, USUAL_CLIENTS, Scene
from support.selection import clients as chosen_clients
from support.servers import CLUSTER
from support.until import until

from redisacc.tools.cli import main


@pytest.fixture
def turns(request, real_server):
    """Kinds of clients, one after the other and again from the beginning, from a place that depends on the test."""
    names = CLUSTER_CLIENTS if real_server.name == CLUSTER else chosen_clients(request.config) or USUAL_CLIENTS
    start = zlib.crc32(request.node.name.encode()) % len(names)
    return itertools.cycle([*names[start:], *names[:start]])


@pytest.fixture
def play(request, proxy, real_server, real_client):
    """Lets an operation meet a fault at a place, and checks it. Returns how it has ended."""
    loaded = CliRunner().invoke(main, ["acl", "--load", "--json", "--redis", real_server.url])
    assert loaded.exit_code == 0, loaded.output

    def play_once(kind, acting, place, client):
        real_client.flushall()
        clock = request.getfixturevalue("clock") if kind.needs_clock else None
        if clock is not None:
            clock.clients = [real_client]
        scene = Scene(proxy, real_client, real_server.url, clock)
        try:
            with scene.closing:
                acting.prepare(scene)
                outcome = kind.meet(scene, acting, place, client)
                messages = {direction: list(found) for direction, found in proxy.lengths.items()}, list(proxy.sent)
                with scene.time():
                    acting.check(scene, outcome)
                    scene.release()
                    acting.again(scene)
                    acting.end(scene)
        except BaseException as error:
            error.add_note(f"{place}, {client}")
            raise
        finally:
            scene.release()
        # An upload that has ended removes its parts in the background, and needs the proxy.
        until(lambda: all(thread.name != "redisacc-upload" for thread in threading.enumerate()))
        assert scene.leftovers() == []
        # For those who ask for it before there are places.
        proxy.lengths, proxy.sent = messages
        return outcome

    return play_once


@pytest.fixture
def everywhere(request, play, proxy, turns, everything):
    """Lets an operation meet a fault at some of its places, or at all of them. Returns how it has ended each time."""

    def play_everywhere(kind, make):
        play(kind.without, make(), None, next(turns))
        places, sent = kind.places(proxy.lengths), proxy.sent
        assert places
        if not request.config.getoption("--long"):
            # Scripts, whose names are not upper-case, and what is written for them, are what a fault could spoil.
            numbers = {number for number, name in enumerate(sent) if not name.isupper() or name == "SET"}
            writing = [place for place in places if place.number in numbers]
            others = [place for place in places if place not in writing]
            number = kind.number * (3 if everything else 1)
            few = min(number // 3, len(others))
            places = _some(writing, number - few) + _some(others, few)
        return [play(kind, make(), place, client) for place, client in zip(places, turns, strict=False)]

    return play_everywhere


def _some(places, number):
    """Returns so many places, or all: the last one, and others at equal distances from it."""
    number = min(number, len(places))
    return [places[-1 - each * len(places) // number] for each in range(number)]
