"""The command line on a real server: mostly in this process, where it is quick."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from redisacc.cli import main


@pytest.fixture
def cli(real_server: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command against the test's server, as into a pipe."""
    monkeypatch.setenv("REDISACC_URL", real_server.url)

    def run(*words: Any, **options: Any) -> Result:
        found = CliRunner().invoke(main, list(map(str, words)), **options)
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exc_info
        return found

    return run


@pytest.fixture
def cli_json(cli: Callable[..., Result]) -> Callable[..., Any]:
    """Runs a command with --json, which must succeed, and returns what it said."""

    def run(*words: Any) -> Any:
        found = cli(*words, "--json")
        assert found.exit_code == 0, found.output

        def no_constant(text: str) -> Any:
            raise AssertionError(f"{text} is no JSON")

        return json.loads(found.stdout, parse_constant=no_constant)

    return run
