"""Processes that do not run for longer than any lease, as after a laptop was closed."""

from __future__ import annotations

from click.testing import CliRunner

from redisacc.tools.cli import main
from support.moved_clock import MovedClock

# Longer than any lease, than any expiry of something small, and than anything is tried for; in seconds.
SECONDS = 150.0


def suspend(clock: MovedClock, url: str) -> None:
    """Lets that time pass at once, in which no process has renewed what it holds, and others have cleaned up."""
    clock.jump(SECONDS)
    collect_garbage(url)


def collect_garbage(url: str) -> None:
    """Removes the keys that nothing uses, as `redisacc doctor --fix` does."""
    done = CliRunner().invoke(main, ["doctor", "--fix", "--yes", "--json", "--redis", url])
    assert done.exit_code == 0, done.output
