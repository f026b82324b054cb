"""`redisacc gc`: removes what nobody owns any more."""

from __future__ import annotations

import click
from rich.progress import track

from redisacc._collecting import WORDS, Leftover, find, remove
from redisacc.cli._common import (
    EXIT_CODES,
    bytes_text,
    confirm,
    console,
    echo_json,
    json_option,
    keys_of,
    link_of,
    print_table,
    redis_option,
    reported,
    yes_option,
)

__all__ = ["gc"]


@click.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@click.option("--dry-run", is_flag=True, help="Show only.")
@redis_option
@yes_option
@json_option
@reported
def gc(*, name: str | None, dry_run: bool, url: str | None, yes: bool, as_json: bool) -> None:
    """Remove what nobody owns any more, of all accumulators or of one: shows it, then asks.

    Leftovers are deletions that were interrupted, parts that no round names, rounds that are not listed, keys and
    names without an accumulator. Normally there are none. Nothing live is touched: each thing is looked at again in
    the moment that it is removed. A round that was taken and not acknowledged is none; `redisacc recover` has those.

    With --json it removes only if --yes is given, too.
    """
    link = link_of(url)
    found = find(link, None if name is None else keys_of(name).name)
    asked = not dry_run and (yes or not as_json)
    if not as_json:
        _show(found)
    removed = 0
    if found and asked:
        confirm("Remove all this?", yes=yes)
        progress = track(found, "removing", console=console(stderr=True), transient=True, disable=as_json)
        removed = sum(remove(link, leftover) for leftover in progress)
    if as_json:
        echo_json({"leftovers": [_facts(leftover) for leftover in found], "removed": removed})
    elif found and asked:
        click.echo(f"removed {removed} of {sum(_number(leftover) for leftover in found)}")


def _number(leftover: Leftover) -> int:
    """How many things remove() counts for it."""
    return 1 if leftover.why in ("deletion", "acknowledged", "name") else len(leftover.keys)


def _show(found: list[Leftover]) -> None:
    if not found:
        click.echo("nothing is left behind")
        return
    print_table(
        ["NAME", "LEFT BEHIND", ">KEYS", ">BYTES"],
        [[lo.name, WORDS[lo.why], str(len(lo.keys)), bytes_text(lo.nbytes)] for lo in found],
    )


def _facts(leftover: Leftover) -> dict[str, object]:
    return {
        "name": leftover.name,
        "why": leftover.why,
        "keys": sorted(leftover.keys),
        "bytes": leftover.nbytes,
    }
