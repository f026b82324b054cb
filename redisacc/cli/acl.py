"""`redisacc acl`: who may do what, as rules for the server's access control list."""

from __future__ import annotations

import shlex

import click

from redisacc._access import ROLES, rules
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
    help="Let the user load the scripts by running them. Without, somebody has to run `redisacc load-scripts` after "
    "every start of the server.",
)
@click.option("--wait", is_flag=True, help="Let the user wait for replicas (min_replicas=).")
@click.option("--redis62", is_flag=True, help="For servers before Redis 7.0, which know no selectors.")
@click.option("--file", "as_file", is_flag=True, help="Print a line for the server's ACL file, not a command.")
def acl(*, role: str, pattern: str, user: str | None, eval_: bool, wait: bool, redis62: bool, as_file: bool) -> None:
    """Print what lets a user of the server work with the accumulators whose names match PATTERN, and no more.

    \b
    worker     opens, creates and applies
    taker      opens, creates, takes, recovers, sets the step
    observer   looks, and listens to events
    operator   all of that, deletes, cleans up, and loads the scripts

    PATTERN is a glob of the server's, 'train-*'. Who both takes and applies needs two users, or --user twice in
    an ACL file of your own. The password is yours to set:

    \b
      redisacc acl worker 'train-*' --user w1 | redis-cli
      redis-cli ACL SETUSER w1 '>its password'
    """
    user = user or f"redisacc-{role}"
    if not user or any(character.isspace() or not character.isprintable() for character in user):
        raise click.BadParameter("a user's name has no spaces", param_hint="--user")
    try:
        found = rules(role, pattern, selectors=not redis62, eval_=eval_, wait=wait)
    except InvalidArgumentError as error:
        raise click.BadParameter(str(error), param_hint="PATTERN") from None
    if as_file:
        click.echo(" ".join(["user", user, *found]))
    else:
        # redis-cli reads quotes as a shell does, where nothing in them has to be escaped.
        click.echo(" ".join(["ACL", "SETUSER", shlex.quote(user), *map(shlex.quote, found)]))
