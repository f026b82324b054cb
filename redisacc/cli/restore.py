"""The command `redisacc restore`: publishes what a checkpoint holds."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click

from redisacc._checkpoints.file import Checkpoint, library, read_file
from redisacc._format.keys import Keys
from redisacc._handles.base import host_and_process
from redisacc._handles.parameters import Parameters
from redisacc._protocol.leases.crew import Crew
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._redis.transport import Transport
from redisacc._text import printable
from redisacc.cli.shared.failures import EXIT_CODES, USAGE, fail, report_failures
from redisacc.cli.shared.options import NonEmptyPath, json_option, keys_of, name_argument, redis_option, transport_of
from redisacc.cli.shared.output import echo_json, echo_wrapped
from redisacc.errors import ConflictError

__all__ = ["restore"]


@click.command(epilog=EXIT_CODES)
@name_argument
@click.argument("file", type=NonEmptyPath())
@click.option("--force", is_flag=True, help="Go back behind what is published: delete the training first.")
@redis_option
@json_option
@report_failures
def restore(*, name: str, file: Path, force: bool, url: str | None, as_json: bool) -> None:
    """Publish the parameters, the state and the step in FILE, so that a chief continues from them.

    FILE is a checkpoint of `redisacc checkpoint` or of a chief, of any training. The command refuses while a chief
    holds its lease. If a later step is published, or the same one with other values, it refuses as well, except with
    --force: it then deletes the training, so that workers that still run end with an error.

    \b
      redisacc restore mnist checkpoints/step-00012000.safetensors
    """
    try:
        library()
    except ImportError as error:
        fail(str(error), USAGE)
    found = read_file(file)
    transport, keys = transport_of(url), keys_of(name)
    who = f"redisacc restore {host_and_process(os.getpid())}"
    crew = Crew(transport, keys.name, holder=secrets.token_hex(8), who=who)
    # Held until the checkpoint is published, so that no chief begins meanwhile.
    taken = crew.take("chief")
    if taken is not None:
        fail(f"{taken.who} is the chief of {printable(keys.name)}: stop it first")
    try:
        before = _publish(transport, keys, found, who, url, force=force)
    finally:
        crew.release("chief", timeout=2.0)
    if as_json:
        echo_json({"before": before, "step": found.step})
    else:
        echo_wrapped(f"published step {found.step} of {printable(str(file))} as {printable(keys.name)}")


def _publish(
    transport: Transport, keys: Keys, found: Checkpoint, who: str, url: str | None, *, force: bool
) -> int | None:
    """Publishes a checkpoint. Returns the step that was published before."""
    with Parameters(keys.name, redis=url, publisher=who) as parameters:
        before = parameters.step()
        try:
            if before is None or before <= found.step:
                parameters.publish(found.parameters, found.step, state=found.state)
                return before
            reason = f"step {before} is published, which is later than step {found.step}"
        except ConflictError as error:
            reason = str(error)
        if not force:
            fail(f"{reason}. To go back, give --force, which deletes the training first")
        incarnation = transport.call("HGET", keys.record, "incarnation")
        if incarnation is not None:
            delete(transport, keys, incarnation.decode("ascii", "replace"))
        parameters.delete()
    with Parameters(keys.name, redis=url, publisher=who) as parameters:
        parameters.publish(found.parameters, found.step, state=found.state)
    return before
