"""Processes that do not run for longer than any lease, as after a laptop was closed."""

from click.testing import CliRunner

from redisacc.tools.cli import main

# Longer than any lease, than any expiry of something small, and than anything is tried for; in seconds.
SECONDS = 150.0


def suspend(clock, url):
    """Lets that time pass at once, in which no process has renewed what it holds, and others have cleaned up."""
    clock.jump(SECONDS)
    collect_garbage(url)


def collect_garbage(url):
    """Removes the keys that nothing uses, as `redisacc doctor --fix` does."""
    done = CliRunner().invoke(main, ["doctor", "--fix", "--yes", "--json", "--redis", url])
    assert done.exit_code == 0, done.output
