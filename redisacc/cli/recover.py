"""The command `redisacc recover`: gets back a round whose taker died."""

from __future__ import annotations

from pathlib import Path

import click

from redisacc._handles.existing import open_existing
from redisacc._monitoring.facts import count_text
from redisacc._protocol.lifecycle.info import read_info
from redisacc._text import age_text, printable
from redisacc.cli.shared.failures import EXIT_CODES, fail, report_failures
from redisacc.cli.shared.options import (
    confirm,
    json_option,
    keys_of,
    name_argument,
    redis_option,
    transport_of,
    yes_option,
)
from redisacc.cli.shared.output import echo_json, echo_wrapped, print_table
from redisacc.cli.take import check_form, naming_file, report_round, write_gradient

__all__ = ["recover"]

_NOTHING = "every round that was taken has been acknowledged"


@click.command(epilog=EXIT_CODES)
@name_argument
@click.option("--token", metavar="TOKEN", help="Round to recover.  [default: the oldest]")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="File for the gradient: .npy, .npz, or -."
)
@click.option("--discard", is_flag=True, help="Discard the round for good.")
@redis_option
@yes_option
@json_option
@report_failures
def recover(
    *, name: str, token: str | None, output: Path | None, discard: bool, url: str | None, yes: bool, as_json: bool
) -> None:
    """Recover a round that was taken but not acknowledged because its taker died, or list such rounds.

    Without --output and --discard, the command lists these rounds and changes nothing. With --output, it writes the
    round to a file, as `redisacc take` does, and then acknowledges it. It asks first, because a taker that is still
    alive loses the round. Exit code 1 means that there is no such round.

    \b
      redisacc recover embeddings
      redisacc recover embeddings --output round.npz
    """
    keys, transport = keys_of(name), transport_of(url)
    info = read_info(transport, keys)
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
            echo_wrapped(_NOTHING, err=True)
        return
    accumulator = open_existing(keys, redis=url)
    form = check_form(accumulator, output, discard=discard)
    if not rounds:
        fail(f"there is no unacknowledged round with the token {token}" if token else _NOTHING)
    chosen = rounds[0]
    echo_wrapped(
        f"step {chosen.global_step}, {count_text(chosen.num_accumulated, 'gradient')}, taken "
        f"{age_text(info.read_at, chosen.granted_at)} ago by {printable(chosen.taker)}",
        err=True,
    )
    effect = "This discards the round for good." if discard else "The taker loses this round."
    confirm(f"{effect} Continue only if its taker is dead.", yes=yes)
    with naming_file(output), accumulator.recover(chosen.token) as taken:
        if taken is None:
            fail("the round was acknowledged or recovered by another process in the meantime")
        if output is not None:
            write_gradient(taken.gradient, form, output)
    report_round("discarded" if discard else "recovered", taken, output, as_json=as_json)
