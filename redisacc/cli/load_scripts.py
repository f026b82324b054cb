"""`redisacc load-scripts`: for users who may run scripts, but not load them."""

from __future__ import annotations

import click

from redisacc import _lua
from redisacc._link import OPENING_PATIENCE, link_to
from redisacc.errors import CorruptDataError, RedisAccError

__all__ = ["load_scripts"]


@click.command("load-scripts")
@click.option("--url", help="The server.  [default: REDISACC_URL, else redis://localhost:6379/0]")
def load_scripts(url: str | None) -> None:
    """Load the scripts of this version of redisacc into the server.

    For users whose rules (`redisacc acl`) let them run scripts, but not load any. A server forgets its scripts when it
    is restarted and on SCRIPT FLUSH, and a replica that is promoted has none: run this again then.
    """
    try:
        link = link_to(url)
        scripts = [_lua.load(name) for name in _lua.names()]
        replies = link.pipeline([("SCRIPT", "LOAD", script.text) for script in scripts], patience=OPENING_PATIENCE)
        for script, reply in zip(scripts, replies, strict=True):
            if reply != script.sha.encode():
                raise CorruptDataError(f"the server names script {script.name} {reply!r:.100}, not {script.sha}")
    except RedisAccError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"Loaded {len(scripts)} scripts: {', '.join(script.name for script in scripts)}.")
