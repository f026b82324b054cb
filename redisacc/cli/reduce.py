"""The command `redisacc reduce`: runs a reducer in the foreground."""

from __future__ import annotations

import signal

import click

from redisacc._handles.reducer import MAX_ACCUMULATORS, Reducer
from redisacc._text import printable
from redisacc.cli.shared.failures import interrupts_raise, report_failures
from redisacc.cli.shared.options import redis_option
from redisacc.cli.shared.output import echo_wrapped

__all__ = ["reduce"]


@click.command(epilog="Exit codes: 0 ended by Ctrl-C or SIGTERM, 1 failure, 2 wrong usage, 6 no server answers.")
@click.argument("pattern", default="*")
@click.option(
    "--max-accumulators",
    type=click.IntRange(1),
    default=MAX_ACCUMULATORS,
    show_default=True,
    help="How many accumulators it works on at the same time.",
)
@click.option(
    "--node",
    metavar="HOST:PORT",
    help="On a Redis Cluster: work only on what this node stores. Run one on the machine of each node.",
)
@click.option("--quiet", is_flag=True, help="Print only warnings and errors.")
@redis_option
@report_failures
def reduce(*, pattern: str, max_accumulators: int, node: str | None, quiet: bool, url: str | None) -> None:
    """Add up large gradients next to the server, so that takers on other machines fetch only their sum.

    PATTERN is a glob of accumulators' names, and all of them by default. Run it on the server's machine, best over a
    Unix socket. It only saves time, and may be stopped at any moment: takers then do its work. Ctrl-C or SIGTERM ends
    it.
    """
    with interrupts_raise(signal.SIGTERM, signal.SIGHUP):
        try:
            reducer = Reducer(pattern, redis=url, max_accumulators=max_accumulators, node=node)
            where = "" if node is None else f" on {printable(node)}"
            if not quiet:
                echo_wrapped(f"reducing {printable(pattern)}{where}; Ctrl-C stops it")
            reducer.run()
        except KeyboardInterrupt:
            if not quiet:
                echo_wrapped("stopped")
