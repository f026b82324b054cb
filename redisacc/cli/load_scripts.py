"""The command `redisacc load-scripts`: loads the scripts for users who may run them, but not load them."""

from __future__ import annotations

import click

from redisacc._clock import durations
from redisacc._redis import script_loader
from redisacc._text import shown
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import json_option, redis_option, transport_of
from redisacc.cli.shared.output import echo_json, echo_wrapped
from redisacc.errors import CorruptDataError

__all__ = ["load_scripts"]


@click.command("load-scripts", epilog=EXIT_CODES)
@redis_option
@json_option
@report_failures
def load_scripts(*, url: str | None, as_json: bool) -> None:
    """Load the scripts of this version of redisacc into the server; in a cluster, into every master.

    Users whose rules come from `redisacc acl` without --eval may run scripts but not load them. Run this command again
    after a restart, after SCRIPT FLUSH, when a replica is promoted and when a master is added, because the scripts are
    not there then.
    """
    transport = transport_of(url)
    scripts = [script_loader.load(name) for name in script_loader.names()]
    if transport.has_sharded_channels():
        scripts = [script.sharded for script in scripts]
    loads = [("SCRIPT", "LOAD", script.text) for script in scripts]
    for address, replies in transport.on_every_master(loads, timeout=durations.opening).items():
        for script, reply in zip(scripts, replies, strict=True):
            if reply != script.sha.encode():
                raise CorruptDataError(
                    f"{address}: SCRIPT LOAD of {script.name} replied {shown(reply)} instead of {script.sha}"
                )
    if as_json:
        echo_json({script.name: script.sha for script in scripts})
    else:
        echo_wrapped(f"loaded {len(scripts)} scripts: {', '.join(script.name for script in scripts)}")
