"""Servers of a test's own, which it may kill."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon
from servers import FAKE, MissingError, executable

import redisacc
from redisacc import _scripts


@pytest.fixture
def daemon(server_name: str, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons of one of the chosen servers, each in a folder of its own; they are gone when the test ends."""
    if server_name == FAKE:
        pytest.skip("nothing that could be killed")
    try:
        program = executable(server_name)
    except MissingError as error:
        if os.environ.get("CI", "").lower() in ("true", "1") and not error.excused:
            pytest.fail(f"no server {server_name}: {error}")
        pytest.skip(f"no server {server_name}: {error}")
    made: list[Daemon] = []

    def make(*options: str, **more: Any) -> Daemon:
        made.append(Daemon(program, tmp_path / f"daemon-{len(made)}", *options, **more))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens accumulators that are closed when the test ends."""
    handles: list[redisacc.ConditionalAccumulatorBase] = []

    def open_one(kind: str, *args: Any, **options: Any) -> Any:
        make = redisacc.SparseConditionalAccumulator if kind == "sparse" else redisacc.ConditionalAccumulator
        handles.append(make(*args, **options))
        return handles[-1]

    yield open_one
    for handle in handles:
        handle.close()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can't reach the server says so after a second."""
    monkeypatch.setattr(_scripts, "OPENING_PATIENCE", 0.5)
    monkeypatch.setattr("redisacc._taking.LOOK_PATIENCE", 0.5)
    monkeypatch.setattr("redisacc._link.PATIENCE", 1.0)
    for name in ("run", "run_and_read", "call", "pipeline", "fetch"):
        function = getattr(_scripts.Link, name)
        monkeypatch.setitem(function.__kwdefaults__, "patience", 1.0)
