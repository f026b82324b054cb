"""Fixtures of the command line: mostly in this process, where a command starts quickly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.exporter import Exporter

import redisacc
from redisacc.tools.cli import main


def _invoke(*words: Any, **options: Any) -> Result:
    result = CliRunner().invoke(main, list(map(str, words)), **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


@pytest.fixture
def cli(real_server: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command against the test's server, as if its output were a pipe."""
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    return _invoke


@pytest.fixture
def cli_json(cli: Callable[..., Result]) -> Callable[..., Any]:
    """Runs a command with --json, which must succeed, and returns its output, parsed."""

    def run(*words: Any) -> Any:
        result = cli(*words, "--json")
        assert result.exit_code == 0, result.output

        def no_constant(text: str) -> Any:
            raise AssertionError(f"{text} is not JSON")

        return json.loads(result.stdout, parse_constant=no_constant)

    return run


@pytest.fixture
def offline_cli(durations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command that needs no server, or must do without: none answers at its default URL."""
    monkeypatch.setenv("REDISACC_URL", "redis://127.0.0.1:1")
    durations(opening=0.1)
    return _invoke


@pytest.fixture
def export(real_server: Any) -> Iterator[Callable[..., Exporter]]:
    """Starts the exporter for the test's server."""
    started: list[Exporter] = []

    def start(*words: str, url: str | None = None) -> Exporter:
        started.append(Exporter(url or real_server.url, *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.returncode is None:
            one.stop()


@pytest.fixture
def accumulator(open_dense: Any) -> Iterator[redisacc.ConditionalAccumulator]:
    """A dense accumulator `w` of three float32 elements, opened by the worker `ann`."""
    opened = open_dense("float32", [3], "w", worker="ann")
    yield opened
    opened.delete()
