"""The command `redisacc acl`: rules for the server's access control list, and the scripts that users may run."""

from __future__ import annotations

import shlex

import click

from redisacc._text import shown
from redisacc._wire import script_loader
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, InvalidArgumentError
from redisacc.tools.admin.acl import ROLES, rules
from redisacc.tools.cli.shared.failures import refuse
from redisacc.tools.cli.shared.options import command, the_server
from redisacc.tools.cli.shared.output import echo_json, given, report


@command()
@click.argument("role", type=click.Choice(list(ROLES)), required=False)
@click.argument("pattern", required=False)
@click.option("--user", help="Name of the server's user.  [default: redisacc-ROLE]")
@click.option(
    "--eval",
    "eval_",
    is_flag=True,
    help="Let the user run scripts by their text, which also loads them. Without it, an operator must run "
    "`redisacc acl --load` after every start of the server.",
)
@click.option("--wait", is_flag=True, help="Let the user wait for replicas (min_replicas=).")
@click.option(
    "--cluster", is_flag=True, help="Let the user find the nodes of a Redis Cluster. Each of them needs the rules."
)
@click.option("--redis62", is_flag=True, help="Do without selectors, for servers older than Redis 7.0.")
@click.option("--file", "as_file", is_flag=True, help="Print a line for the server's ACL file instead of a command.")
@click.option("--load", is_flag=True, help="Load the scripts into the server, and the rules if there is a ROLE.")
def acl(
    *,
    role: str | None,
    pattern: str | None,
    user: str | None,
    as_file: bool,
    load: bool,
    redis62: bool,
    **allowed: bool,
) -> None:
    """Print the rules that let a user of the server do one job, and no more, on the accumulators that match PATTERN.

    \b
    worker     creates, applies gradients, reads parameters
    taker      creates, takes, recovers, sets the step and the quorum, publishes
    reducer    adds up large gradients, and updates parameters with the sums
    observer   reads, listens to events
    operator   all of the above; also deletes, collects garbage, loads the scripts

    PATTERN is a glob as Redis understands it, for example 'train-*'. A process that both applies and takes needs two
    users, or one user with the rules of both roles. The rules contain no password; set it yourself:

    \b
      redisacc acl worker 'train-*' --user w1 | redis-cli
      redis-cli ACL SETUSER w1 '>its password'

    With --load, the command prints nothing: it sets the rules on the server, and loads the scripts of this version of
    redisacc; in a cluster, on every master. Without ROLE, it only loads the scripts. Users without --eval may run
    scripts but not load them. So run this again after a restart, after SCRIPT FLUSH, when a replica is promoted and
    when a master is added, because the scripts are missing then:

    \b
      redisacc acl --load
    """
    refuse(
        (role is None or pattern is None) and (role is not None or not load),
        "give a ROLE and a PATTERN, or --load without them",
    )
    refuse(load and as_file, "give --load or --file, not both")
    name, found = "", list[str]()
    if role is not None and pattern is not None:
        name = user or f"redisacc-{role}"
        if any(character.isspace() or not character.isprintable() for character in name):
            raise click.BadParameter("a user's name must not contain spaces or control characters", param_hint="--user")
        try:
            found = rules(role, pattern, selectors=not redis62, **allowed)
        except InvalidArgumentError as error:
            raise click.BadParameter(str(error), param_hint="PATTERN") from None
    if load:
        transport = the_server()
        if name:
            transport.on_masters([("ACL", "SETUSER", name, *found)])
        scripts = _load_scripts(transport)
        rules_of = f"set the rules of {name}, and " if name else ""
        report(scripts, f"{rules_of}loaded {len(scripts)} scripts: {', '.join(scripts)}")
    elif given("json"):
        echo_json({"user": name, "rules": found})
    elif as_file:
        click.echo(" ".join(["user", name, *found]))
    else:
        # redis-cli reads quotes as a shell does, as long as nothing inside them is escaped.
        click.echo(" ".join(["ACL", "SETUSER", shlex.quote(name), *map(shlex.quote, found)]))


def _load_scripts(transport: Transport) -> dict[str, str]:
    """Loads the scripts into the server, or into every master of a cluster. Returns name → SHA-1."""
    scripts = [script_loader.load(name) for name in script_loader.names()]
    if transport.has_sharded_channels():
        scripts = [script.sharded for script in scripts]
    loads = [("SCRIPT", "LOAD", script.text) for script in scripts]
    replies, _ = transport.on_masters(loads)
    for address, found in replies.items():
        for script, reply in zip(scripts, found, strict=True):
            if reply != script.sha.encode():
                raise CorruptDataError(
                    f"{address}: SCRIPT LOAD of {script.name} replied {shown(reply)} instead of {script.sha}"
                )
    return {script.name: script.sha for script in scripts}
