"""`redisacc load-scripts`: for users who may run scripts, but not load them."""

from __future__ import annotations

import click

from redisacc import _lua
from redisacc._link import OPENING_PATIENCE
from redisacc.cli._common import EXIT_CODES, echo_json, json_option, link_of, redis_option, reported, say
from redisacc.errors import CorruptDataError

__all__ = ["load_scripts"]


@click.command("load-scripts", epilog=EXIT_CODES)
@redis_option
@json_option
@reported
def load_scripts(*, url: str | None, as_json: bool) -> None:
    """Load the scripts of this version of redisacc into the server.

    For users whose rules (`redisacc acl`) let them run scripts, but not load any. A server forgets its scripts when it
    is restarted and on SCRIPT FLUSH, and a replica that is promoted has none: run this again then.
    """
    scripts = [_lua.load(name) for name in _lua.names()]
    loads = [("SCRIPT", "LOAD", script.text) for script in scripts]
    for script, reply in zip(scripts, link_of(url).pipeline(loads, patience=OPENING_PATIENCE), strict=True):
        if reply != script.sha.encode():
            raise CorruptDataError(f"the server names script {script.name} {reply!r:.100}, not {script.sha}")
    if as_json:
        echo_json({script.name: script.sha for script in scripts})
    else:
        say(f"Loaded {len(scripts)} scripts: {', '.join(script.name for script in scripts)}.")
