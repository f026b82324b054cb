"""`redisacc ls`: all accumulators, a line each."""

from __future__ import annotations

from typing import Any

import click

from redisacc._info import AccumulatorInfo, read_info
from redisacc._keys import Keys
from redisacc._looking import list_names, memory
from redisacc.cli._common import (
    EXIT_CODES,
    age_text,
    bytes_text,
    echo_json,
    json_option,
    link_of,
    print_table,
    redis_option,
    reported,
    safe,
    shape_text,
)
from redisacc.errors import AccumulatorNotFoundError, CorruptDataError

__all__ = ["ls"]


@click.command(epilog=EXIT_CODES)
@click.argument("pattern", default="*")
@click.option("--private", is_flag=True, help="Private ones too (walks over all keys of the server).")
@redis_option
@json_option
@reported
def ls(*, pattern: str, private: bool, url: str | None, as_json: bool) -> None:
    """List accumulators.

    PATTERN is a glob as Redis has them, '*' unless given: 'demo-*'. WAITING says how many gradients the first taker
    in the queue asks for, and how many takers stand behind it. BYTES is what Redis keeps for it, taken rounds included.
    """
    link = link_of(url)
    found: list[tuple[AccumulatorInfo, int]] = []
    for name in list_names(link, pattern, private=private):
        keys = Keys(name)
        try:
            found.append((read_info(link, keys), sum(sort.nbytes for sort in memory(link, keys))))
        except AccumulatorNotFoundError:
            # Deleted since it was listed, or its creator died before its record came to be: `redisacc gc`.
            continue
        except CorruptDataError as error:
            click.echo(f"redisacc: {safe(str(error))}", err=True)
    if as_json:
        echo_json([_facts(info, size) for info, size in found])
        return
    if not found:
        click.echo(f"no accumulators{'' if pattern == '*' else ' of that pattern'} at {link.address}", err=True)
        return
    print_table(
        ["NAME", "KIND", "DTYPE", "SHAPE", ">STEP", ">COUNT", ">WAITING", ">BYTES", ">ACTIVE"],
        [
            [
                info.name,
                info.kind,
                info.dtype,
                shape_text(info.shape),
                str(info.global_step),
                str(info.num_accumulated),
                waiting_text(info),
                bytes_text(size) if size else "-",
                age_text(info.read_at, info.last_activity),
            ]
            for info, size in found
        ],
    )


def waiting_text(info: AccumulatorInfo) -> str:
    """How many the head of the queue asks for, and how many stand behind it."""
    if not info.waiting:
        return "-"
    behind = len(info.waiting) - 1
    return str(info.waiting[0].num_required) + (f" +{behind}" if behind else "")


def _facts(info: AccumulatorInfo, size: int) -> dict[str, Any]:
    return {
        "name": info.name,
        "kind": info.kind,
        "dtype": info.dtype,
        "shape": info.shape,
        "reduction_type": info.reduction_type,
        "global_step": info.global_step,
        "num_accumulated": info.num_accumulated,
        "waiting": [waiting.num_required for waiting in info.waiting],
        "unacknowledged": len(info.unacknowledged),
        "bytes": size,
        "last_activity": info.last_activity,
    }
