"""Plays operations."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from faults import CLUSTER_CLIENTS, USUAL_CLIENTS, FaultKind, Scene
from operations import Operation, Outcome
from support.selection import clients as chosen_clients
from support.servers import CLUSTER

from redisacc.cli import main


@pytest.fixture
def turns(request, real_server) -> Iterator[str]:
    """Kinds of clients, one after the other and again from the beginning, from a place that depends on the test."""
    names = CLUSTER_CLIENTS if real_server.name == CLUSTER else chosen_clients(request.config) or USUAL_CLIENTS
    start = zlib.crc32(request.node.name.encode()) % len(names)
    return itertools.cycle([*names[start:], *names[:start]])


@pytest.fixture
def play(request, proxy, real_server, real_client) -> Callable[..., Outcome]:
    """Lets an operation meet a fault at a place, and checks it. Returns how it has ended."""
    loaded = CliRunner().invoke(main, ["load-scripts", "--json", "--redis", real_server.url])
    assert loaded.exit_code == 0, loaded.output

    def play_once(kind: FaultKind, acting: Operation, place: Any, client: str) -> Outcome:
        real_client.flushall()
        clock = request.getfixturevalue("clock") if kind.needs_clock else None
        if clock is not None:
            clock.clients = [real_client]
        scene = Scene(proxy, real_client, real_server.url, clock)
        try:
            with scene.closing:
                acting.prepare(scene)
                outcome = kind.meet(scene, acting, place, client)
                lengths = {direction: list(found) for direction, found in scene.proxy.lengths.items()}
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
        assert scene.leftovers() == []
        # For those who ask for it before there are places.
        proxy.lengths = lengths
        return outcome

    return play_once


@pytest.fixture
def everywhere(request, play, proxy, turns, everything) -> Callable[..., list[Outcome]]:
    """Lets an operation meet a fault at some of its places, or at all of them. Returns how it has ended each time."""

    def play_everywhere(kind: FaultKind, make: Callable[[], Operation]) -> list[Outcome]:
        play(kind.without, make(), None, next(turns))
        places = kind.places(proxy.lengths)
        if not request.config.getoption("--long"):
            places = _some(places, kind.number * (3 if everything else 1))
        return [play(kind, make(), place, client) for place, client in zip(places, turns, strict=False)]

    return play_everywhere


def _some(places: list[Any], number: int) -> list[Any]:
    """Returns so many places, or all: the last one, and others at equal distances from it."""
    return places[:: -max(len(places) // number, 1)][:number]
