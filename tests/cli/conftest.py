"""Fixtures of the command line: mostly in this process, where a command starts quickly."""

import json

import pytest
from click.testing import CliRunner
from support.exporter import Exporter

from redisacc.tools.cli import main


def _invoke(*words, **options):
    result = CliRunner().invoke(main, list(map(str, words)), **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


@pytest.fixture
def cli(real_server, client, monkeypatch):
    """Runs a command against the test's server, as if its output were a pipe."""
    monkeypatch.setenv("REDISACC_URL", real_server.url)
    return _invoke


@pytest.fixture
def cli_json(cli):
    """Runs a command with --json, which must succeed, and returns its output, parsed."""

    def run(*words):
        result = cli(*words, "--json")
        assert result.exit_code == 0, result.output

        def no_constant(text):
            raise AssertionError(f"{text} is not JSON")

        return json.loads(result.stdout, parse_constant=no_constant)

    return run


@pytest.fixture
def offline_cli(durations, monkeypatch):
    """Runs a command that needs no server, or must do without: none answers at its default URL."""
    monkeypatch.setenv("REDISACC_URL", "redis://127.0.0.1:1")
    durations(opening=0.1)
    return _invoke


@pytest.fixture
def export(real_server):
    """Starts the exporter for the test's server."""
    started = []

    def start(*words, url=None):
        started.append(Exporter(url or real_server.url, *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.returncode is None:
            one.stop()


@pytest.fixture
def accumulator(open_dense):
    """A dense accumulator `w` of three float32 elements, opened by the worker `ann`."""
    opened = open_dense("float32", [3], "w", worker="ann")
    yield opened
    opened.delete()
