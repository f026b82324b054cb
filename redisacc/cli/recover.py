"""`redisacc recover`: a round whose taker died, into a file."""

from __future__ import annotations

from pathlib import Path

import click

from redisacc._existing import open_existing
from redisacc._info import read_info
from redisacc.cli._common import (
    EXIT_CODES,
    age_text,
    confirm,
    counted,
    echo_json,
    fail,
    json_option,
    keys_of,
    link_of,
    name_argument,
    print_table,
    redis_option,
    reported,
    safe,
    say,
    yes_option,
)
from redisacc.cli._files import check_output, save
from redisacc.cli.take import report_round

__all__ = ["recover"]


@click.command(epilog=EXIT_CODES)
@name_argument
@click.option("--token", metavar="TOKEN", help="Which round.  [default: the oldest]")
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Where to: .npy, .npz, or -.")
@click.option("--discard", is_flag=True, help="Throw the round away.")
@redis_option
@yes_option
@json_option
@reported
def recover(
    *, name: str, token: str | None, output: Path | None, discard: bool, url: str | None, yes: bool, as_json: bool
) -> None:
    """Get back a round that was taken and never acknowledged, because its taker died; or list them.

    Without --output and --discard it lists them and changes nothing. With --output the round is written to a file (as
    by `redisacc take`) and then acknowledged. It asks first: if the taker is still alive and at work, it would lose the
    round. Exit code 1: there is none to recover.
    """
    link, keys = link_of(url), keys_of(name)
    info = read_info(link, keys)
    rounds = [taken for taken in info.unacknowledged if token in (None, taken.token)]
    if output is None and not discard:
        if as_json:
            echo_json([vars(taken) for taken in rounds])
        elif rounds:
            print_table(
                [">STEP", ">GRADIENTS", ">AGE", "TAKER", "TOKEN"],
                [
                    [
                        str(taken.global_step),
                        str(taken.num_accumulated),
                        age_text(info.read_at, taken.granted_at),
                        taken.taker,
                        taken.token,
                    ]
                    for taken in rounds
                ],
            )
        else:
            click.echo("every round that was taken has been acknowledged", err=True)
        return
    check_output(output, discard=discard, sparse=info.kind == "sparse")
    if not rounds:
        fail("there is no such round" if token else "every round that was taken has been acknowledged")
    chosen = rounds[0]
    say(
        f"step {chosen.global_step}, {counted(chosen.num_accumulated, 'gradient')}, taken "
        f"{age_text(info.read_at, chosen.granted_at)} ago by {safe(chosen.taker)}",
        err=True,
    )
    confirm("Is that taker dead, and shall the round be " + ("thrown away?" if discard else "recovered?"), yes=yes)
    with open_existing(keys, redis=url).recover(chosen.token) as taken:
        if taken is None:
            fail("somebody else recovered or acknowledged it meanwhile")
        if output is not None:
            assert taken.gradient is not None
            save(taken.gradient, output)
    report_round("recovered", taken, output, as_json=as_json)
