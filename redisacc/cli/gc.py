"""The command `redisacc gc`: removes garbage: keys that nothing uses."""

from __future__ import annotations

import click
from rich.progress import Progress

from redisacc._admin.garbage import WORDS, Leftover, find_garbage, remove_garbage
from redisacc._monitoring.facts import bytes_text, count_text
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import confirm, json_option, keys_of, redis_option, transport_of, yes_option
from redisacc.cli.shared.output import console, echo_json, print_table

__all__ = ["gc"]


@click.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@click.option("--dry-run", is_flag=True, help="Show the garbage and remove nothing.")
@redis_option
@yes_option
@json_option
@report_failures
def gc(*, name: str | None, dry_run: bool, url: str | None, yes: bool, as_json: bool) -> None:
    """Remove the garbage of all accumulators, or of one: show it, then ask.

    Garbage is an interrupted deletion, a part that no round refers to, an object that no parameters refer to, data of
    a round that is not listed, a key or a name without a record. With partitions, it is also a part in a partition that
    no gradient and no parameters refer to, and an attempt to store something there that is over. Normally there is
    none. Live data is safe: the script that removes a key checks again that nothing uses it, and keys out of reach of
    scripts are only removed if nothing can refer to them again. A round that was taken but not acknowledged is not
    garbage; use `redisacc recover`.

    With --json, nothing is removed without --yes.
    """
    transport = transport_of(url)
    found = find_garbage(transport, None if name is None else keys_of(name).name)
    removing = not dry_run and (yes or not as_json)
    if not as_json:
        _show(found)
    removed = 0
    if found and removing:
        confirm("Remove all of this garbage?", yes=yes)
        with Progress(console=console(stderr=True), transient=True, disable=as_json) as progress:
            task = progress.add_task("removing", total=len(found))
            for leftover in found:
                removed += remove_garbage(transport, leftover)
                progress.advance(task)
    if as_json:
        echo_json({"leftovers": [_facts(leftover) for leftover in found], "removed": removed})
    elif found and removing:
        total = sum(_number(leftover) for leftover in found)
        click.echo(f"removed {removed} of {count_text(total, 'item')}")


def _number(leftover: Leftover) -> int:
    """Returns how many items `remove` counts for it."""
    return 1 if leftover.why in ("deletion", "acknowledged", "parameters", "name") else len(leftover.keys)


def _show(found: list[Leftover]) -> None:
    if not found:
        click.echo("no garbage")
        return
    print_table(
        ["NAME", "GARBAGE", ">KEYS", ">BYTES"],
        [
            [leftover.name, WORDS[leftover.why], str(len(leftover.keys)), bytes_text(leftover.nbytes)]
            for leftover in found
        ],
    )


def _facts(leftover: Leftover) -> dict[str, object]:
    return {
        "name": leftover.name,
        "why": leftover.why,
        "keys": sorted(leftover.keys),
        "bytes": leftover.nbytes,
    }
