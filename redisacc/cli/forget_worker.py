"""The command `redisacc forget-worker`: forgets a worker that will not return."""

from __future__ import annotations

import click

from redisacc._data import validation
from redisacc._protocol.leases.forgetting import forget_worker as forget
from redisacc._protocol.lifecycle.info import read_info
from redisacc._protocol.lifecycle.similar_names import did_you_mean
from redisacc._text import age_text, printable, shown
from redisacc.cli.shared.failures import EXIT_CODES, NOT_FOUND, fail, report_failures
from redisacc.cli.shared.options import json_option, keys_of, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import echo_json, echo_wrapped

__all__ = ["forget_worker"]


@click.command("forget-worker", epilog=EXIT_CODES)
@name_argument
@click.argument("worker")
@redis_option
@json_option
@report_failures
def forget_worker(*, name: str, worker: str, url: str | None, as_json: bool) -> None:
    """Forget a WORKER that will not return, so that nothing lists it as late or gone.

    Its gradients in the round stay, and count. If it is alive after all and sends another gradient, it is known again.
    A worker of a training, such as 'worker 3', can be forgotten once its lease has run out.

    \b
      redisacc forget-worker embeddings spot-17:4242
    """
    worker = validation.text(worker, "WORKER", max_bytes=200)
    transport, keys = transport_of(url), keys_of(name)
    info = read_info(transport, keys)
    known = {each.name: each for each in info.known_workers}
    if not forget(transport, keys, info.incarnation, worker):
        fail(f"{shown(keys.name)} knows no worker {shown(worker)}{did_you_mean(worker, known)}", NOT_FOUND)
    if as_json:
        echo_json({"name": keys.name, "forgotten": worker})
        return
    seen = f", last seen {age_text(info.read_at, known[worker].seen_at)} ago" if worker in known else ""
    echo_wrapped(f"{printable(keys.name)} has forgotten {printable(worker)}{seen}")
