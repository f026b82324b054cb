"""The command `redisacc acl`: rules for the server's access control list."""

from __future__ import annotations

import shlex

import click

from redisacc._admin.acl import ROLES, rules
from redisacc.errors import InvalidArgumentError

__all__ = ["acl"]


@click.command()
@click.argument("role", type=click.Choice(list(ROLES)))
@click.argument("pattern")
@click.option("--user", help="Name of the server's user.  [default: redisacc-ROLE]")
@click.option(
    "--eval",
    "eval_",
    is_flag=True,
    help="Let the user run scripts by their text, which also loads them. Without it, an operator must run "
    "`redisacc load-scripts` after every start of the server.",
)
@click.option("--wait", is_flag=True, help="Let the user wait for replicas (min_replicas=).")
@click.option(
    "--cluster", is_flag=True, help="Let the user find the nodes of a Redis Cluster. Each of them needs the rules."
)
@click.option("--redis62", is_flag=True, help="Do without selectors, for servers older than Redis 7.0.")
@click.option("--file", "as_file", is_flag=True, help="Print a line for the server's ACL file instead of a command.")
def acl(
    *,
    role: str,
    pattern: str,
    user: str | None,
    eval_: bool,
    wait: bool,
    cluster: bool,
    redis62: bool,
    as_file: bool,
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
    """
    user = user or f"redisacc-{role}"
    if not user or any(character.isspace() or not character.isprintable() for character in user):
        raise click.BadParameter("a user's name must not contain spaces or control characters", param_hint="--user")
    try:
        found = rules(role, pattern, selectors=not redis62, eval_=eval_, wait=wait, cluster=cluster)
    except InvalidArgumentError as error:
        raise click.BadParameter(str(error), param_hint="PATTERN") from None
    if as_file:
        click.echo(" ".join(["user", user, *found]))
    else:
        # redis-cli reads quotes as a shell does, as long as nothing inside them is escaped.
        click.echo(" ".join(["ACL", "SETUSER", shlex.quote(user), *map(shlex.quote, found)]))
