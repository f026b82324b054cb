"""The command `redisacc doctor`: checks whether a server suits accumulators, and removes garbage."""

from __future__ import annotations

from collections.abc import Iterator

import click
import redis as redis_py

from redisacc import __version__
from redisacc._clock import durations
from redisacc._text import printable
from redisacc._wire.transport import Transport, limited
from redisacc.tools.admin.garbage import WORDS, find_garbage
from redisacc.tools.cli import checks
from redisacc.tools.cli.checks import Finding, ok
from redisacc.tools.cli.shared.failures import FAILED, refuse
from redisacc.tools.cli.shared.options import command, confirm, keys_of, the_server
from redisacc.tools.cli.shared.output import console, echo_json, given, print_table
from redisacc.tools.monitoring.facts import bytes_text, count_text


@command(yes=True)
@click.argument("name", required=False)
@click.option("--fix", is_flag=True, help="Remove garbage: keys that nothing uses. Shows it, and asks first.")
@click.option("--dry-run", is_flag=True, help="With --fix: show the garbage and remove nothing.")
def doctor(*, name: str | None, fix: bool, dry_run: bool) -> None:
    """Check whether a server suits accumulators, and suggest changes; or remove garbage.

    The checks are version, role, eviction, memory, persistence, access, Lua, clock, latency and a trial. The trial
    applies and takes a small gradient in a private accumulator and then removes it. In a cluster, every master is
    checked, and the coverage of the slots, and the replicas.

    Exit code 1 means that something marked BAD must be changed. Checks that the access rules deny to this user do not
    count.

    With --fix, the command checks nothing, but removes the garbage of all accumulators, or of NAME: it shows what it
    would remove, and asks. Garbage is an interrupted deletion, a part that no round refers to, an object that no
    parameters refer to, data of a round that is not listed, a key or a name without a record. With partitions, it is
    also a part in a partition that no gradient and no parameters refer to, and an attempt to store something there that
    has ended. Normally there is none. Live data is safe: the script that removes a key checks again that nothing uses
    it, and keys out of reach of scripts are only removed if nothing can refer to them again. A round that was taken but
    not acknowledged is not garbage; use `redisacc take --recover`. With --json, nothing is removed without --yes.

    \b
      redisacc doctor
      redisacc doctor --fix
    """
    refuse(not fix and (name is not None or dry_run or given("yes")), "NAME, --dry-run and --yes need --fix")
    transport = the_server()
    if fix:
        _fix(transport, name, dry_run=dry_run)
        return
    findings = list(_examine(transport))
    if given("json"):
        echo_json([{"what": what, **vars(finding)} for what, finding in findings])
    else:
        _print(findings)
    if any(finding.status == "bad" for _, finding in findings):
        raise SystemExit(FAILED)


def _examine(transport: Transport) -> Iterator[tuple[str, Finding]]:
    """Runs the checks one after the other and yields the name of each, and what it found."""
    yield "client", ok(f"redisacc {__version__}, redis-py {redis_py.__version__}, {transport.address}")
    servers, silent = checks.servers_of(transport)
    # The checks cannot wait for what is missing.
    with limited(durations.opening):
        if transport.cluster is not None:
            yield "cluster", checks.cluster(transport, silent)
        for what in checks.OF_EACH:
            yield from ((what, finding) for finding in checks.findings(what, servers))
        yield "access", checks.access(transport, given("url"))
        yield "lua", checks.lua(transport)
        yield "clock", checks.clock(transport)
        yield "latency", checks.latency(transport)
        yield "trial", checks.trial(transport)


_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "bad": ("BAD ", "red")}


def _print(findings: list[tuple[str, Finding]]) -> None:
    width = max(40, console().width - 20)
    for what, finding in findings:
        mark, color = _MARKS[finding.status]
        lines = click.wrap_text(printable(finding.found), width).splitlines() or [""]
        lines += click.wrap_text(printable(finding.advice), width, "-> ", "   ").splitlines() if finding.advice else []
        for number, line in enumerate(lines):
            head = f"{click.style(mark, fg=color)}  {what:<12}" if number == 0 else " " * 18
            click.echo(f"{head}  {line}")


def _fix(transport: Transport, name: str | None, *, dry_run: bool) -> None:
    """Shows the garbage, and removes it after a question."""
    found = find_garbage(transport, None if name is None else keys_of(name).name)
    as_json = given("json")
    removing = bool(found) and not dry_run and (given("yes") or not as_json)
    if not as_json and not found:
        click.echo("no garbage")
    elif not as_json:
        print_table(
            ["NAME", "GARBAGE", ">KEYS", ">BYTES"],
            [[of.name, WORDS[of.why], len(of.keys), bytes_text(of.nbytes)] for of in found],
        )
    removed = 0
    if removing:
        confirm("Remove all of this garbage?")
        removed = sum(leftover.remove() for leftover in found)
    if as_json:
        leftovers = [{"name": of.name, "why": of.why, "keys": sorted(of.keys), "bytes": of.nbytes} for of in found]
        echo_json({"leftovers": leftovers, "removed": removed})
    elif removing:
        click.echo(f"removed {removed} of {count_text(sum(of.items for of in found), 'item')}")
