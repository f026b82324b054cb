"""The commands `redisacc checkpoint`, which writes what is published into a file, and `redisacc restore`."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

import click
import numpy as np

from redisacc._checkpoints.address import place_of
from redisacc._checkpoints.file import Checkpoint, read_file, write_file
from redisacc._format.keys import SNAPSHOT, Keys
from redisacc._format.parameter_record import TRAINING
from redisacc._handles.base import host_and_process
from redisacc._handles.parameters import Parameters
from redisacc._protocol.leases.crew import Crew
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._text import printable
from redisacc._training.checkpointer import read_published, training_of
from redisacc._wire.transport import Transport
from redisacc.errors import ConflictError
from redisacc.tools.cli.shared.failures import NOT_FOUND, fail
from redisacc.tools.cli.shared.options import NonEmptyPath, command, keys_of, name_argument, the_server
from redisacc.tools.cli.shared.output import report
from redisacc.tools.monitoring.facts import bytes_text


@command()
@name_argument
@click.argument("file", type=NonEmptyPath(str))
def checkpoint(*, name: str, file: str) -> None:
    """Write the published parameters, the chief's state and the step into FILE.

    The run may continue meanwhile. FILE is in the format of safetensors. An existing file is replaced; after a crash,
    it is either the old one or the new one. It may be an address that fsspec knows, such as s3://bucket/file. `redisacc
    restore` publishes it again.

    \b
      redisacc checkpoint mnist mnist-final.safetensors
    """
    transport, keys = the_server(), keys_of(name)
    found = read_published(transport, keys.name)
    if found is None:
        fail(f"nothing has been published under the name {printable(keys.name)}", NOT_FOUND)
    nbytes = write_file(place_of(file), found)
    report(
        {"file": file, "step": found.step, "bytes": nbytes},
        f"wrote step {found.step} of {printable(keys.name)} to {printable(file)}: {bytes_text(nbytes)}",
    )


@command()
@name_argument
@click.argument("file", type=NonEmptyPath(str))
@click.option("--force", is_flag=True, help="Go back to an earlier step: delete the run first.")
def restore(*, name: str, file: str, force: bool) -> None:
    """Publish the parameters, the state and the step in FILE, so that a chief continues from them.

    FILE is a checkpoint, or its address, that `redisacc checkpoint` or a chief has written, of any run. The command
    refuses while a chief holds its lease. If a later step is published, or the same one with other values, it refuses
    as well, except with --force: it then deletes the run, and workers that still run end with an error.

    \b
      redisacc restore mnist checkpoints/step-00012000.safetensors
    """
    found = read_file(place_of(file))
    transport, keys = the_server(), keys_of(name)
    who = f"redisacc restore {host_and_process(os.getpid())}"
    crew = Crew(transport, keys.name, holder=secrets.token_hex(8), who=who)
    # Held until the checkpoint is published, so that no chief begins meanwhile.
    taken = crew.take("chief")
    if taken is not None:
        fail(f"{taken.who} is the chief of {printable(keys.name)}: stop it first")
    try:
        before = _publish(transport, keys, found, who, force=force)
    finally:
        crew.release("chief")
    text = f"published step {found.step} of {printable(file)} as {printable(keys.name)}"
    report({"before": before, "step": found.step}, text)


def _publish(transport: Transport, keys: Keys, found: Checkpoint, who: str, *, force: bool) -> int | None:
    """Publishes a checkpoint. Returns the step that was published before."""
    is_snapshot, name = training_of(found.state) is not None, keys.name
    if is_snapshot:
        # Its training begins with it, and publishes mean gradients under the name.
        name, found = name + SNAPSHOT, replace(found, state={**found.state, TRAINING: np.zeros(0, np.uint8)})
    with Parameters(keys.name, redis=transport, publisher=who) as parameters:
        before = parameters.step()
        try:
            if (before is None or before <= found.step) and not is_snapshot:
                parameters._publish(found.parameters, found.step, None, found.state, False, kept=found.kept)
                return before
            reason = f"step {before} is published" + ("" if is_snapshot else f", which is later than step {found.step}")
        except ConflictError as error:
            reason = str(error)
        if before is not None and not force:
            fail(f"{reason}. To go back, give --force, which deletes the run first")
        incarnation = transport.call("HGET", keys.record, "incarnation")
        if incarnation is not None:
            delete(transport, keys, incarnation.decode("ascii", "replace"))
        parameters.delete()
    with Parameters(name, redis=transport, publisher=who) as parameters:
        if is_snapshot:
            parameters.delete()
            parameters._forget()
        parameters._publish(found.parameters, found.step, None, found.state, False, kept=found.kept)
    return before
